"""docs/coming-from lists where settings of other systems are here: its names exist, and the converters agree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig
from skyrl.interop.report import Conversion
from skyrl.interop.trl import convert as trl
from skyrl.interop.verl import convert as verl
from skyrl.tree import FrozenDict, get_at
from tests.interop.corpora import RECORDED

PAGE = (RECORDED.parents[1] / "docs" / "coming-from" / "README.md").read_text()
HEAD = "| here | verl | TRL | prime-rl | NeMo-RL | OpenRLHF |"
BASES: dict[str, dict[str, Any]] = {
    "verl": {
        "actor_rollout_ref.model.path": "a/b",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
        "reward_model.reward_manager": "dapo",
    },
    "TRL": {
        "model_name_or_path": "a/b", "use_vllm": True, "use_peft": True, "eval_strategy": "steps", "num_generations": 4,
    },
}  # fmt: skip
VALUES: dict[str, Any] = {
    "algorithm.rollout_correction.rollout_is": "token", "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla", "actor_rollout_ref.actor.kl_loss_type": "kl",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine", "vllm_importance_sampling_mode": "token_truncate",
    "data.train_files": "a.parquet", "dataset_name": "a", "loss_type": "grpo", "lr_scheduler_type": "cosine",
    "scale_rewards": "group", "algorithm.adv_estimator": "rloo", "beta": 0.1,
    "data.prompt_key": "q", "algorithm.norm_adv_by_std_in_grpo": False, "gradient_checkpointing": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False, "vllm_gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5, "run_name": "a", "trainer.experiment_name": "a",
}  # fmt: skip
"""A value of each setting that takes no number."""


def rows() -> Iterator[list[str]]:
    table = PAGE[PAGE.index(HEAD) :].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [" ".join(re.findall(r"`([^`]+)`", cell)) for cell in line.strip("|").split("|")]


def converted(system: str, key: str, value: Any, extra_keys: Mapping[str, Any] = FrozenDict()) -> Conversion:
    converters: dict[str, Callable[[Mapping[str, Any]], Conversion]]
    converters = {"verl": verl.convert_keys, "TRL": trl.convert_keys}
    return converters[system]({**BASES[system], **extra_keys, key: value})


def test_every_path_of_the_table_is_a_field() -> None:
    assert len(list(rows())) > 30
    for path, *_ in rows():
        get_at(SkyRLTrainConfig(), path)


@pytest.mark.parametrize(("system", "column"), [("verl", 1), ("TRL", 2)])
def test_the_converters_write_where_the_table_says(system: str, column: int) -> None:
    elsewhere = []
    for row in rows():
        if key := row[column]:
            value = VALUES.get(key, BASES[system].get(key, 8))
            [line] = [line for line in converted(system, key, value).lines if line.source == key]
            elsewhere += [(key, line.reason)] * (row[0] not in line.targets)
    assert elsewhere == []


def test_the_tables_options_exist_in_the_other_systems() -> None:
    known = json.loads((RECORDED / "other_systems_2026_08.json").read_text())
    tops = {name: {top for file in known[name].values() for top in file} for name in ("prime-rl", "NeMo-RL")}
    tops["OpenRLHF"] = {word.partition(".")[0] for words in known["OpenRLHF"].values() for word in words}
    tops["prime-rl"] |= {"orchestrator"}
    for row in rows():
        for name, option in zip(("prime-rl", "NeMo-RL", "OpenRLHF"), row[3:], strict=True):
            assert not option or option.partition(".")[0] in tops[name], option
