"""Makes `foreign_names.json` of `config/foundation`: the settings of other systems by our paths, from the converters'
tables.

`make pages` writes the file. Suggestions for unknown paths read it, which know nothing of converters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.config.loading.kinds import root_of
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.interop.areal import keys as areal_keys
from skyrl.interop.areal import learner_keys as areal_learner_keys
from skyrl.interop.areal import supervised as areal_supervised
from skyrl.interop.translation import Entry, UnexpectedValue, translate
from skyrl.interop.trl import dependent as trl_dependent
from skyrl.interop.trl import keys as trl_keys
from skyrl.interop.verl import keys as verl_keys
from skyrl.interop.verl import layout as verl_layout
from skyrl.interop.verl import objective as verl_objective
from skyrl.tree.classes import leaf_paths
from tests.interop.test_settings_table import HEAD, VALUES, converted, rows

ALONE: Mapping[str, Mapping[str, Entry]] = {
    "AReaL": {**areal_keys.KEYS, **areal_keys.ROLLOUT_KEYS, **areal_learner_keys.LEARNER_KEYS},
    "TRL": trl_keys.KEYS,
    "verl": verl_keys.KEYS,
}
"""Settings that are converted one by one."""

TOGETHER = {
    "TRL": trl_dependent.DEPENDENT,
    "verl": {**verl_layout.LAYOUT, **verl_objective.OBJECTIVE, **verl_objective.REWARDS},
}
"""Settings whose conversion depends on others."""

ACTOR = "actor_rollout_ref.actor."
WITH: Mapping[str, Mapping[str, Any]] = {
    "algorithm.kl_ctrl.": {"algorithm.use_kl_in_reward": True},
    "algorithm.kl_penalty": {"algorithm.use_kl_in_reward": True},
    f"{ACTOR}policy_loss.clip": {f"{ACTOR}policy_loss.loss_mode": "clip_cov"},
    f"{ACTOR}policy_loss.": {f"{ACTOR}policy_loss.loss_mode": "kl_cov"},
    f"{ACTOR}tau_": {f"{ACTOR}policy_loss.loss_mode": "sapo"},
    "sapo_": {"loss_type": "sapo"},
}
"""Beginning of a setting -> others with which it has an effect."""

_LOW, _HIGH = "trainer.algorithm.eps_clip_low", "trainer.algorithm.eps_clip_high"
_LORA, _ANSWER = "trainer.policy.model.lora.", "generator.sampling_params.max_generate_length"
BY_HAND: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("OpenAI", "max_completion_tokens", (_ANSWER,)),
    ("OpenRLHF", "init_kl_coef", ("trainer.algorithm.kl_loss_coef",)),
    ("PEFT", "lora.r", (f"{_LORA}rank",)),
    ("PEFT", "lora.lora_alpha", (f"{_LORA}alpha",)),
    ("PEFT", "lora.lora_dropout", (f"{_LORA}dropout",)),
    ("Stable-Baselines3", "clip_range", (_LOW, _HIGH)),
    ("Stable-Baselines3", "clip_range_vf", ("trainer.algorithm.value_clip",)),
    ("Stable-Baselines3", "ent_coef", ("trainer.algorithm.entropy_loss_coef",)),
    ("Stable-Baselines3", "gae_lambda", ("trainer.algorithm.lambd",)),
    ("AReaL", "cluster.fileroot", ("trainer.ckpt_path",)),  # in a folder of the experiment's
    ("AReaL's SFT", "cluster.fileroot", ("ckpt_path",)),
    ("TRL", "cliprange", (_LOW, _HIGH)),
    ("TRL", "disable_dropout", ("trainer.policy.use_dropout",)),  # if the model has dropout
    ("verl", "trainer.resume_from_path", ("trainer.resume_path",)),  # with a mode that reads it
    (
        "TRL",
        "gradient_accumulation_steps",
        ("trainer.policy_mini_batch_size", "trainer.micro_train_batch_size_per_gpu"),
    ),
    ("TRL", "num_train_epochs", ("num_epochs",)),
    ("TRL", "max_steps", ("num_steps",)),
    ("TRL", "per_device_train_batch_size", ("batch_size",)),
    ("TRL", "report_to", ("trainer.logger",)),
    ("TRL", "kl_coef", ("trainer.algorithm.kl_loss_coef",)),
    ("transformers", "max_new_tokens", (_ANSWER,)),
    ("verl", f"{ACTOR}clip_ratio", (_LOW, _HIGH)),
)
"""(system, setting, our paths): settings that no converter reads, or only with others."""


_LOSS, _ESTIMATOR = "trainer.algorithm.policy_loss_type", "trainer.algorithm.advantage_estimator"
_REDUCTION = "trainer.algorithm.loss_reduction"
VALUES_BY_HAND: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(("other systems", f"{_LOSS}={name}", (f"{_LOSS}=regular",)) for name in ("ppo", "ppo_clip", "clip")),
    *(("other systems", f"{_LOSS}={name}", (f"{_LOSS}=online_dpo",)) for name in ("dpo", "onlinedpo")),
    ("other systems", f"{_ESTIMATOR}=ppo", (f"{_ESTIMATOR}=gae",)),
    ("OpenRLHF", f"{_ESTIMATOR}=group_norm", (f"{_ESTIMATOR}=grpo",)),
    ("OpenRLHF", f"{_ESTIMATOR}=reinforce", (f"{_ESTIMATOR}=reinforce++",)),
    ("OpenRLHF", f"{_ESTIMATOR}=reinforce_baseline", (f"{_ESTIMATOR}=reinforce++-baseline",)),
    *(("other systems", f"{_ESTIMATOR}={name}", ("extends=preset:dr-grpo",)) for name in ("dr_grpo", "drgrpo")),
    ("other systems", f"{_ESTIMATOR}=dapo", ("extends=preset:dapo",)),
    *(("other systems", f"loss_type={name}", ("loss_type=sigmoid",)) for name in ("dpo", "cdpo")),
    *(("other systems", f"loss_type={name}", ("loss_type=hinge",)) for name in ("slic", "rso")),
)
"""(system, field=value, what to set): losses and estimators that the converters do not know by these names."""


def foreign_names() -> str:
    """The file: one [system, setting, our paths] a line. A setting may be one of our fields with a value that is not
    ours, and its paths then have values.
    """
    entries = {(system, key, tuple(paths)) for system, key, paths in (*_all(), *_values()) if paths}
    lines = map(json.dumps, sorted(entries))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _all() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    systems = [name.strip() for name in HEAD.strip("|").split("|")][1:]
    for path, *cells in rows():  # of systems that no converter reads; a cell may name several settings
        for system, cell in zip(systems, cells, strict=True):
            yield from ((system, key, (path,)) for key in cell.split() if system not in TOGETHER)
    for system, keys in TOGETHER.items():
        yield from ((system, key, _together(system, key)) for key in keys if is_one_number(key))
    for system, entries in ALONE.items():
        yield from ((system, key, _alone(entry)) for key, entry in entries.items() if "*" not in key)
    supervised = {leaf for leaf, _ in leaf_paths(root_of("sft"))}
    for key, entry in areal_supervised.KEYS.items():
        if "*" not in key and supervised.issuperset(_alone(entry)):  # the table has copies that no file of SFT reaches
            yield "AReaL's SFT", key, _alone(entry)
    yield from BY_HAND


def _values() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Losses and estimators that are called otherwise here."""
    for field, names in ((_LOSS, verl_objective.LOSSES), (_ESTIMATOR, verl_objective.ESTIMATORS)):
        yield from (
            ("verl", f"{field}={name}", (f"{field}={value}",)) for name, value in names.items() if name != value
        )
    for name, reduction in trl_dependent.REDUCTIONS.items():
        if name not in POLICY_LOSSES:
            loss = trl_dependent.loss_of({"loss_type": name})
            yield "TRL", f"{_LOSS}={name}", (f"{_LOSS}={loss}", f"{_REDUCTION}={reduction}")
    yield from VALUES_BY_HAND


def is_one_number(key: str) -> bool:
    """Whether a number can be the value of a setting: patterns and tables have no path of their own."""
    return "*" not in key and not key.endswith("kwargs")


def _alone(entry: Entry) -> tuple[str, ...]:
    """The paths that a setting is written to, whatever its value."""
    for value in (1, 0.5, "x", True, ["x"]):
        try:
            writes = translate(entry, value).writes
        except (UnexpectedValue, TypeError, ValueError, AttributeError, KeyError):
            continue  # a value that the setting does not take
        if writes:
            return tuple(writes)
    return ()


def _together(system: str, key: str) -> tuple[str, ...]:
    extra_settings = next((values for start, values in WITH.items() if key.startswith(start)), {})
    for value in [VALUES[key]] if key in VALUES else (4, 0.5, True):
        for line in converted(system, key, value, extra_settings).lines:
            if line.source == key and line.targets and line.outcome in ("kept", "renamed"):
                return line.targets
    return ()
