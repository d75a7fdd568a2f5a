"""A setting with a value of a wrong kind is refused in its own row; no conversion ends in a traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from skyrl.interop.areal import convert as areal
from skyrl.interop.areal import keys, learner_keys, supervised
from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.prime_rl import convert as prime_rl
from skyrl.interop.report import Conversion
from skyrl.interop.skyrl import sft
from skyrl.interop.trl import convert as trl
from skyrl.interop.trl import dependent as trl_dependent
from skyrl.interop.trl import keys as trl_keys
from skyrl.interop.trl.sources import CONVERTED
from skyrl.interop.verl import convert as verl
from skyrl.interop.verl import keys as verl_keys
from skyrl.interop.verl import layout as verl_layout
from skyrl.interop.verl import objective as verl_objective
from tests.interop.test_settings_table import BASES

WRONG = ["text", 0, [[1], "a"], {"a": 1}, float("nan")]
"""Values of every kind; each is wrong for most settings."""

AREAL = {
    "actor.path": "a/b", "rollout.backend": "vllm:d1", "actor.backend": "fsdp:d1", "gconfig.n_samples": 4,
    "train_dataset.batch_size": 4, "actor.use_decoupled_loss": True, "ref.path": "a/b", "critic.path": "a/b",
    "actor.use_lora": True,
}  # fmt: skip
SUPERVISED = {"model.path": "a/b", "train_dataset.type": "sft", "model.backend": "fsdp:d1"}


TURNED_ON = ("use_peft", "use_vllm", "sync_ref_model", "beta", "eval_strategy", "reward_funcs")
"""Settings of TRL that turn others on: any value but an empty one does."""


def _keys(*tables: Mapping[str, Any]) -> list[str]:
    """The settings that functions of the tables convert, a pattern by one of its names."""
    functions = {key for table in tables for key, entry in table.items() if callable(entry)}
    return sorted({key.replace("*", "x") for key in functions} - {"train_dataset.type"})


SYSTEMS: dict[str, tuple[Callable[[Mapping[str, Any]], Conversion], Mapping[str, Any], list[str]]] = {
    "areal": (
        areal.convert_keys,
        AREAL,
        _keys(areal._DEPENDENT, keys.KEYS, learner_keys.LEARNER_KEYS, keys.ROLLOUT_KEYS, areal._SAME),
    ),
    "areal, supervised": (
        areal.convert_keys,
        SUPERVISED,
        _keys(supervised._DEPENDENT, supervised.KEYS, supervised._SAME),
    ),
    "trl": (trl.convert_keys, BASES["TRL"], _keys(trl_dependent.DEPENDENT, trl_keys.KEYS)),
    **{
        f"trl, {kind}": (
            partial(trl.convert_keys, kind=kind),
            {"model_name_or_path": "a/b"} | dict.fromkeys(TURNED_ON, True),
            sorted({key for tree in peer_trees("trl", kind) for key in tree.defaults} - {*TURNED_ON}),
        )
        for kind in CONVERTED
    },
    "verl": (verl.convert_keys, BASES["verl"], _keys(verl_keys.KEYS, verl_layout.LAYOUT, verl_objective.OBJECTIVE)),
    "prime-rl": (prime_rl.convert_keys, {"model.name": "a/b"}, _keys(prime_rl._DEPENDENT, prime_rl.KEYS)),
    "skyrl, supervised": (
        lambda values: sft.convert_settings([*values.items()], "file"),
        {"model.path": "a/b"},
        [*sft.SFT_ROOTS, "model.lora.rank"],
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_value_of_a_setting_ends_in_a_traceback(system: str, wrong: object) -> None:
    convert, base, names = SYSTEMS[system]
    values = {**base, **dict.fromkeys(names, wrong)}
    assert {*values} <= {line.source for line in convert(values).lines}


@pytest.mark.parametrize(
    ("system", "key", "value", "expected"),
    [
        ("trl", "chat_template_kwargs", "text", "a table"),
        ("trl", "chat_template_kwargs", [1], "a table"),
        ("trl", "model_init_kwargs", 7, "a table"),
        ("trl", "gradient_checkpointing_kwargs", "text", "a table"),
        ("trl", "lr_scheduler_kwargs", "text", "a table"),
        ("trl", "max_steps", "many", "a number"),
        ("trl", "eval_steps", [1], "a number"),
        ("trl", "save_steps", float("nan"), "a number"),
        ("trl", "warmup_ratio", "text", "a number"),
        ("trl", "loss_type", ["grpo"], "one of grpo, sapo"),
        ("verl", "algorithm.adv_estimator", {"a": 1}, "one of gae, grpo"),
        ("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", [], "one of vanilla"),
        ("verl", "trainer.resume_mode", [], "one of auto"),
        ("areal", "actor.optimizer.lr_scheduler_type", ["linear"], "one of constant"),
        ("areal, supervised", "model.optimizer.lr_scheduler_type", {}, "one of constant"),
    ],
)
def test_the_row_says_what_is_expected(system: str, key: str, value: object, expected: str) -> None:
    convert, base, _ = SYSTEMS[system]
    [line] = [line for line in convert({**base, key: value}).lines if line.source == key]
    assert line.outcome == "refused" and line.reason.startswith(f"expected {expected}")
