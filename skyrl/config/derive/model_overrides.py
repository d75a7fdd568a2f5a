"""Values of a model's own Hugging Face configuration that a run replaces, in learners and engines alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import facts_of
from skyrl.config.settings.trainer import TrainerConfig
from skyrl.tree import get_at

LONGEST_ROW = "longest_row"
"""Entry beside the values by name: tokens of the run's longest row, which choose one set of rotary embeddings. Left
out, they are those for all positions of the model."""


def learner_overrides(trainer: TrainerConfig, model: str) -> Mapping[str, Any]:
    """Values by name for `policy`, `critic` or `ref`; `rope_scaling` and `rope_theta` apply to all models."""
    return _with_rope(_own(trainer, model), trainer.rope_scaling, trainer.rope_theta, trainer.longest_row)


def engine_overrides(run: SkyRLTrainConfig) -> Mapping[str, Any]:
    """Values by name for the engines: those of the policy. The tree must have passed `check`."""
    trainer, generator = run.trainer, run.generator
    return _with_rope(_own(trainer, "policy"), generator.rope_scaling, generator.rope_theta, trainer.longest_row)


def _own(trainer: TrainerConfig, model: str) -> Mapping[str, Any]:
    """Values from the table of the model, where the strategy reads them."""
    own: Mapping[str, Any] = get_at(getattr(trainer, model), facts_of(trainer).overrides)
    return own


def _with_rope(
    own: Mapping[str, Any], scaling: Mapping[str, Any] | None, theta: float | None, longest: int | None
) -> dict[str, Any]:
    rope = {"rope_scaling": scaling, "rope_theta": theta, LONGEST_ROW: longest}
    return {**own, **{name: value for name, value in rope.items() if value is not None}}
