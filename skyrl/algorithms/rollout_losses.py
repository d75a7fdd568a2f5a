"""Policy losses that use the engine's own log-probabilities, and losses without clipping."""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.losses import LossInputs, clipped_surrogate, importance_ratio, is_clipped


@attrs.frozen(kw_only=True)
class RolloutISLoss:
    """`"rollout_is"`: -A sg(rho 1[1 - low < rho < 1 + high]) log pi with rho = pi / pi_rollout.

    IcePop (Ring-1T, arXiv:2510.18855): tokens on which engine and learner differ too much have no gradient.
    """

    eps_clip_low: float
    eps_clip_high: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        ratio = importance_ratio(inputs.logprobs.detach(), inputs.rollout_logprobs)
        return -inputs.advantages * torch.where(self._is_in_clip_range(ratio), ratio, 0.0) * inputs.logprobs

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        ratio = importance_ratio(inputs.logprobs.detach(), inputs.rollout_logprobs)
        return {"clip_ratio": ~self._is_in_clip_range(ratio)}

    def _is_in_clip_range(self, ratio: Tensor) -> Tensor:
        return (1 - self.eps_clip_low < ratio) & (ratio < 1 + self.eps_clip_high)


@attrs.frozen(kw_only=True)
class DPPOLoss:
    """`"dppo"`: -rho A M, where the mask M drops tokens that would move the policy beyond a bound on the divergence.

    arXiv:2602.04879. pi and mu are the probabilities of the drawn token now and in the engine. binary_tv drops a token
    if A > 0 and pi - mu > high, or A < 0 and mu - pi > low; binary_kl does so if the divergence of the two Bernoulli
    distributions is above that bound and pi has moved in the direction of A.
    """

    dppo_type: Literal["binary_tv", "binary_kl"]
    delta_low: float
    delta_high: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        ratio = importance_ratio(inputs.logprobs, inputs.rollout_logprobs)
        return -torch.where(self._cut(inputs), 0.0, ratio) * inputs.advantages

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        return {"clip_ratio": self._cut(inputs)}

    def _cut(self, inputs: LossInputs) -> Tensor:
        log_now, log_then = inputs.logprobs.detach(), inputs.rollout_logprobs
        now, then = log_now.exp(), log_then.exp()
        if self.dppo_type == "binary_tv":
            distance = (now - then).abs()
        else:
            stays = torch.log((1 - then + 1e-8) / (1 - now + 1e-8))
            distance = then * (log_then - log_now) + (1 - then) * stays
        rising = (inputs.advantages > 0) & (now > then) & (distance > self.delta_high)
        return rising | ((inputs.advantages < 0) & (now < then) & (distance > self.delta_low))


@attrs.frozen(kw_only=True)
class DecoupledLoss:
    """`"decoupled"`: w max(-A u, -A clip(u, 1 - low, 1 + high)) with u = pi / pi_old and w = pi_old / pi_rollout.

    Decoupled PPO of AReaL, arXiv:2505.24298, eq. 5: the old policy is the proximal policy, and the engine's policy,
    which may be several versions behind, is the behaviour policy. w has no gradient. With a cap
    (`behav_imp_weight_cap`), `mask` leaves out tokens with w > cap, which still count in denominators, and `clamp`
    limits w to the cap. Without one, w is used as it is. `dual_clip` bounds the loss by `clip_ratio_c`.
    """

    eps_clip_low: float
    eps_clip_high: float
    behav_imp_weight_cap: float | None = None
    cap_mode: Literal["mask", "clamp"] = "mask"
    dual_clip: bool = False
    clip_ratio_c: float | None = None

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
        loss = clipped_surrogate(ratio, inputs.advantages, clip_low=self.eps_clip_low, clip_high=self.eps_clip_high)
        if self.dual_clip and self.clip_ratio_c is not None:
            loss = torch.minimum(loss, self.clip_ratio_c * inputs.advantages.abs())
        return self._weight(inputs) * loss

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        ratio, weight = importance_ratio(inputs.logprobs, inputs.old_logprobs), self._behaviour(inputs)
        clipped = is_clipped(ratio, inputs.advantages, clip_low=self.eps_clip_low, clip_high=self.eps_clip_high)
        capped = (
            weight > self.behav_imp_weight_cap if self.behav_imp_weight_cap is not None else torch.zeros_like(clipped)
        )
        return {"clip_ratio": clipped, "behave_weight": weight, "behave_capped_ratio": capped}

    def _weight(self, inputs: LossInputs) -> Tensor:
        weight = self._behaviour(inputs)
        if self.behav_imp_weight_cap is None:
            return weight
        if self.cap_mode == "clamp":
            return weight.clamp(max=self.behav_imp_weight_cap)
        return torch.where(weight > self.behav_imp_weight_cap, 0.0, weight)

    def _behaviour(self, inputs: LossInputs) -> Tensor:
        return importance_ratio(inputs.old_logprobs, inputs.rollout_logprobs).detach()


@attrs.frozen(kw_only=True)
class ImportanceSamplingLoss:
    """`"importance_sampling"`: -r A with r = pi / pi_old, unclipped."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        return -importance_ratio(inputs.logprobs, inputs.old_logprobs) * inputs.advantages

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        return {"importance_ratio": importance_ratio(inputs.logprobs, inputs.old_logprobs)}


@attrs.frozen(kw_only=True)
class CrossEntropyLoss:
    """`"cross_entropy"`: -log pi, whatever the reward: imitation of the sampled tokens."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        return -inputs.logprobs
