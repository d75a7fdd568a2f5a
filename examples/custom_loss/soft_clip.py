"""A policy loss of one's own, with a setting of its own. Nothing of skyrl has to be subclassed."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from skyrl.algorithms.losses import LossInputs, importance_ratio
from skyrl.tree import field, frozen
from skyrl.tree.validators import positive


@frozen
class SoftClip:
    """-A w tanh((r - 1) / w): PPO's ratio, flattened smoothly instead of cut off.

    Near r = 1 it is the policy gradient; far from it a token has no more influence than its clipped self would have.
    """

    width: float = field(default=0.2, validator=positive)
    """How far the ratio may move before its influence fades, as `eps_clip_low` and `eps_clip_high` in one."""

    zero_at_zero_advantage: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> Tensor:
        ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
        return -inputs.advantages * self.width * torch.tanh((ratio - 1) / self.width)

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """`policy/faded_ratio`: the share of tokens further out than the width."""
        ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
        return {"faded_ratio": (ratio - 1).abs() > self.width}
