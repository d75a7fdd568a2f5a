"""Defaults of AReaL's that differ from ours, for settings that an experiment file leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.interop.areal_values import ALGORITHM, ENGINE, OPTIMIZER, SAMPLING, SHAPING
from skyrl.interop.report import OtherDefault
from skyrl.tree import get_at

DEFAULTS: dict[str, tuple[Any, str, Any]] = {
    "actor.kl_ctl": (0.1, ALGORITHM + "use_kl_in_reward", True),
    "actor.reward_clip": (20.0, SHAPING + "clip", 20.0),
    "actor.optimizer.lr": (0.001, OPTIMIZER + "lr", 0.001),
    "actor.optimizer.eps": (1e-8, OPTIMIZER + "adam_eps", 1e-8),
    "actor.optimizer.weight_decay": (0.01, OPTIMIZER + "weight_decay", 0.01),
    "actor.optimizer.warmup_steps_proportion": (0.001, OPTIMIZER + "warmup_steps_proportion", 0.001),
    "gconfig.n_samples": (1, "generator.n_samples_per_prompt", 1),
    "gconfig.max_new_tokens": (16384, SAMPLING + "max_generate_length", 16384),
    "sglang.disable_radix_cache": (True, ENGINE + "enable_prefix_caching", False),
    "seed": (1, "trainer.seed", 1),
    "total_train_epochs": (1, "trainer.epochs", 1),
}
"""AReaL's key -> its default of May 2026, our path, and our value that means the same."""


def other_defaults(values: Mapping[str, Any], run: Any) -> Iterator[OtherDefault]:
    """Settings that a whole experiment leaves out, and that have another value here."""
    if "actor.path" not in values:
        return
    for key, (theirs, path, same) in DEFAULTS.items():
        ours = get_at(run, path)
        if key not in values and ours != same:
            yield OtherDefault(source=key, theirs=theirs, path=path, ours=ours)
    batch = values.get("train_dataset.batch_size")
    path = "trainer.policy_mini_batch_size"
    if "actor.ppo_n_minibatches" not in values and isinstance(batch, int) and get_at(run, path) * 4 != batch:
        yield OtherDefault(source="actor.ppo_n_minibatches", theirs=4, path=path, ours=get_at(run, path))
