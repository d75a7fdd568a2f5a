"""AReaL's defaults, for settings that an experiment file leaves out.

Those that change what is learned are written into the converted file. The others are listed where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.interop.areal_objective import has_critic
from skyrl.interop.areal_values import ENGINE
from skyrl.interop.report import OtherDefault
from skyrl.tree import get_at

MINI_BATCHES = 4
"""Mini-batches of a batch, where the file does not say."""

_OPTIMIZERS = {
    2025: {"lr": 2e-5, "weight_decay": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-5},
    2026: {"lr": 1e-3, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
}
_OPTIMIZER = {"warmup_steps_proportion": 0.001, "lr_scheduler_type": "constant", "gradient_clipping": 1.0}

_LEARNING: dict[int, dict[str, Any]] = {2025: {"async_training": True}, 2026: {}}
_LEARNING_ALWAYS: dict[str, Any] = {
    "seed": 1,
    "total_train_epochs": 1,
    "train_dataset.batch_size": 1,
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "gconfig.temperature": 1.0,
    "rollout.max_head_offpolicyness": 0,
    "actor.ppo_n_minibatches": MINI_BATCHES,
    "actor.reward_clip": 20.0,
    "actor.kl_ctl": 0.1,
}
_CRITIC: dict[str, Any] = {"critic.eps_clip": 0.5, "critic.ppo_n_minibatches": MINI_BATCHES}
_NORM = {2025: {"std_unbiased": False}, 2026: {"std_unbiased": True}}
_NORM_ALWAYS: dict[str, Any] = {"mean_level": "batch", "std_level": "batch", "eps": 1e-5}

_INSTEAD = {
    "total_train_epochs": ("total_train_steps", "total_train_n_seqs"),
    "gconfig.n_samples": ("group_size",),
    "train_dataset.batch_size": ("dataset.train_bs_n_seqs",),
}
"""Settings by other names, of which one is enough."""

NO_REFERENCE = (
    "with no ref in the file, AReaL takes this times the log-probability of each token from its reward, a bonus for "
    "entropy: set it to 0, or name ref.path"
)
"""Reason for refusing a KL weight without a reference."""

OTHERS: dict[str, tuple[Any, str, Any]] = {
    "recover.freq_steps": (None, "trainer.ckpt_interval", -1),
    "evaluator.freq_steps": (None, "trainer.eval_interval", -1),
    "sglang.disable_radix_cache": (True, ENGINE + "enable_prefix_caching", False),
}
"""Defaults that change no training: AReaL's key -> its default of 2026, our path, and our value that means the same."""


def age(values: Mapping[str, Any]) -> int:
    """Year of the AReaL that a file is written for. Since 2026 each engine names its own backend."""
    return 2026 if any(key.endswith(".backend") and value for key, value in values.items()) else 2025


def is_whole(values: Mapping[str, Any]) -> bool:
    """Whether the file describes a run, and not some of its settings, or one of AReaL's older system."""
    return ("actor.path" in values or has_critic(values)) and not any(key.startswith("ppo.") for key in values)


def has_reference(values: Mapping[str, Any]) -> bool:
    """Whether the file configures a reference model."""
    return any(key.startswith("ref.") for key in values)


def left_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a whole experiment leaves out and that change what is learned, with AReaL's defaults of its age."""
    if not is_whole(values):
        return {}
    year = age(values)
    optimizer = _OPTIMIZERS[year] | _OPTIMIZER
    found = _LEARNING_ALWAYS | _LEARNING[year] | {f"actor.optimizer.{name}": each for name, each in optimizer.items()}
    if has_critic(values):
        found |= _CRITIC | {f"critic.optimizer.{name}": each for name, each in optimizer.items()}
    for norm in ("actor.adv_norm", "actor.reward_norm"):
        if any(key.startswith(f"{norm}.") for key in values):
            found |= {f"{norm}.{name}": each for name, each in (_NORM_ALWAYS | _NORM[year]).items()}
    if not splits_evenly(values):
        found = {key: value for key, value in found.items() if not key.endswith(".ppo_n_minibatches")}
    return {key: value for key, value in found.items() if not _is_given(key, values)}


def splits_evenly(values: Mapping[str, Any]) -> bool:
    """Whether a batch is as many whole prompts as AReaL's default of 4 mini-batches asks for."""
    batch = values.get("train_dataset.batch_size", values.get("dataset.train_bs_n_seqs", 1))
    return isinstance(batch, int) and batch % MINI_BATCHES == 0


def other_defaults(values: Mapping[str, Any], run: Any) -> Iterator[OtherDefault]:
    """Settings that a whole experiment leaves out, that change no training, and that have another value here."""
    for key, (theirs, path, same) in OTHERS.items() if is_whole(values) else ():
        group = key.removesuffix("steps")
        ours = get_at(run, path)
        if not any(each.startswith(group) for each in values) and ours != same:
            yield OtherDefault(source=key, theirs=theirs, path=path, ours=ours)
    key, path = "actor.ppo_n_minibatches", "trainer.policy_mini_batch_size"
    if is_whole(values) and key not in values and not splits_evenly(values):
        yield OtherDefault(source=key, theirs=MINI_BATCHES, path=path, ours=get_at(run, path))


def _is_given(key: str, values: Mapping[str, Any]) -> bool:
    """Whether the file has the setting, or the one that replaces it."""
    return any(each in values for each in (key, *_INSTEAD.get(key, ())))
