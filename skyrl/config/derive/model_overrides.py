"""Values of a model's own Hugging Face configuration that a run replaces, in learners and engines alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import facts_of
from skyrl.tree import get_at

LONGEST_ROW = "longest_row"
"""Entry beside the values by name: tokens of the run's longest row, which choose one set of rotary embeddings. Left
out, they are those for all positions of the model."""


def learner_overrides(run: RunBasics, section: ShardedModelConfig) -> dict[str, Any]:
    """Values by name for the model of this table; `rope_scaling` and `rope_theta` apply to all models."""
    return _overrides(run, section, run.rope_scaling, run.rope_theta)


def engine_overrides(run: SkyRLTrainConfig) -> dict[str, Any]:
    """Values by name for the engines: those of the policy. The tree must have passed `check`."""
    return _overrides(run.trainer, run.trainer.policy, run.generator.rope_scaling, run.generator.rope_theta)


def _overrides(
    run: RunBasics, section: ShardedModelConfig, scaling: Mapping[str, Any] | None, theta: float | None
) -> dict[str, Any]:
    own: Mapping[str, Any] = get_at(section, facts_of(run).overrides)
    rope = {"rope_scaling": scaling, "rope_theta": theta, LONGEST_ROW: run.longest_row}
    return {**own, **{name: value for name, value in rope.items() if value is not None}}
