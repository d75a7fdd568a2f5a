"""Policy losses on the ratio to the old policy, each with its own way to limit ratios far from 1."""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.losses import LossInputs, clipped_surrogate, importance_ratio, is_clipped, ppo_clip
from skyrl.algorithms.masked import masked_mean


@attrs.frozen(kw_only=True)
class RegularLoss:
    """`policy_loss_type = "regular"`: PPO's clipped surrogate, arXiv:1707.06347, eq. 7."""

    eps_clip_low: float
    eps_clip_high: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        return ppo_clip(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            clip_low=self.eps_clip_low,
            clip_high=self.eps_clip_high,
        )

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
        clipped = is_clipped(ratio, inputs.advantages, clip_low=self.eps_clip_low, clip_high=self.eps_clip_high)
        return {"clip_ratio": clipped}


@attrs.frozen(kw_only=True)
class DualClipLoss(RegularLoss):
    """`"dual_clip"`: the loss of `regular`, but at most -c A if the advantage A is negative. arXiv:1912.09729."""

    clip_ratio_c: float
    """c, at least 1: bound on the loss of a token with a negative advantage, in multiples of |A|."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        loss = super().__call__(inputs)
        bounded = torch.minimum(loss, -self.clip_ratio_c * inputs.advantages)
        return torch.where(inputs.advantages < 0, bounded, loss)


@attrs.frozen(kw_only=True)
class GSPOLoss:
    """`"gspo"`: one ratio for the whole answer, the geometric mean of its tokens' ratios, clipped as in `regular`.

    arXiv:2507.18071, in its form with a gradient per token (GSPO-token): the value is the answer's, and the gradient
    flows through each token's own log-probability. Intended for `sequence_mean`.
    """

    eps_clip_low: float
    eps_clip_high: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        ratio = self._ratio(inputs)
        return clipped_surrogate(ratio, inputs.advantages, clip_low=self.eps_clip_low, clip_high=self.eps_clip_high)

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        clipped = is_clipped(
            self._ratio(inputs), inputs.advantages, clip_low=self.eps_clip_low, clip_high=self.eps_clip_high
        )
        return {"clip_ratio": clipped}

    def _ratio(self, inputs: LossInputs) -> Tensor:
        current = inputs.logprobs.detach()
        answer_log_ratio = masked_mean(current - inputs.old_logprobs, inputs.mask, dim=1).unsqueeze(1)
        return torch.exp((inputs.logprobs - current + answer_log_ratio).clamp(max=10.0))


@attrs.frozen(kw_only=True)
class GMPOLoss:
    """`"gmpo"`: the geometric mean of an answer's ratios, each clipped where it would be in PPO, times the advantage.

    arXiv:2507.20673, with bounds on the logarithm of a token's ratio. Every token of an answer has the answer's loss,
    so that `sequence_mean` is the paper's objective. All tokens of an answer are expected to have one advantage.
    """

    log_clip_low: float
    log_clip_high: float
    """Bounds of |log r| below and above; the paper has 0.4 for both."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        log_ratio = inputs.logprobs - inputs.old_logprobs
        clamped = torch.where(
            self._is_clamped(inputs), log_ratio.clamp(-self.log_clip_low, self.log_clip_high), log_ratio
        )
        answer_ratio = torch.exp(masked_mean(clamped, inputs.mask, dim=1).clamp(max=10.0)).unsqueeze(1)
        return -answer_ratio * inputs.advantages

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        return {"clip_ratio": self._is_clamped(inputs)}

    def _is_clamped(self, inputs: LossInputs) -> Tensor:
        log_ratio = inputs.logprobs - inputs.old_logprobs
        too_high = (log_ratio > self.log_clip_high) & (inputs.advantages > 0)
        return too_high | ((log_ratio < -self.log_clip_low) & (inputs.advantages < 0))


@attrs.frozen(kw_only=True)
class CISPOLoss:
    """`"cispo"`: -A sg(clip(r, 1 - low, 1 + high)) log pi. The weight is clipped, every token keeps a gradient.

    MiniMax-M1, arXiv:2506.13585. `cispo_anchor` is the denominator of r: the policy before this batch, or the engine.
    """

    cispo_eps_clip_low: float
    cispo_eps_clip_high: float
    cispo_anchor: Literal["old", "rollout"] = "old"

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        weight = self._ratio(inputs).clamp(1 - self.cispo_eps_clip_low, 1 + self.cispo_eps_clip_high)
        return -inputs.advantages * weight * inputs.logprobs

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        ratio = self._ratio(inputs)
        clamped = ratio.clamp(1 - self.cispo_eps_clip_low, 1 + self.cispo_eps_clip_high)
        return {"clip_ratio": ratio != clamped, "cispo/ratio": ratio, "cispo/ratio_clamped_mean": clamped}

    def _ratio(self, inputs: LossInputs) -> Tensor:
        other = inputs.old_logprobs if self.cispo_anchor == "old" else inputs.rollout_logprobs
        return importance_ratio(inputs.logprobs.detach(), other)


@attrs.frozen(kw_only=True)
class SAPOLoss:
    """`"sapo"`: -(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of clipping, with slope 1 at r = 1.

    arXiv:2511.20347; tau is `tau_pos` where A > 0, `tau_neg` elsewhere. Intended for `sequence_mean`.
    """

    tau_pos: float
    tau_neg: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(inputs.advantages > 0, self.tau_pos)
        return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * inputs.advantages
