"""Which experiment a run is, by its `kind`."""

from __future__ import annotations

from typing import Any

from skyrl.errors import UserError


def experiment_of(kind: str) -> type[Any]:
    """The class that runs it; what the others import stays out."""
    match kind:
        case "rl":
            from skyrl.experiments.ppo import BasePPOExp

            return BasePPOExp
        case "sft":
            from skyrl.experiments.sft import SFTExp

            return SFTExp
        case "reward_model":
            from skyrl.experiments.reward_model import RewardModelExp

            return RewardModelExp
    raise UserError(f"there is no kind of run {kind!r}")
