"""Policy losses that restrain tokens whose log-probability and advantage covary: these tokens reduce the entropy.

arXiv:2505.22617, section 4. The tokens are chosen among all tokens of one call, so these two losses depend on how a
mini-batch is cut into micro-batches; no other loss does.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.losses import LossInputs, clipped_surrogate, importance_ratio, is_clipped
from skyrl.algorithms.masked import masked_mean


@attrs.frozen(kw_only=True)
class ClipCovLoss:
    """`"clip_cov"`: PPO's surrogate without a random sample of the tokens of high covariance.

    arXiv:2505.22617. The sample is `clip_ratio` of the selected tokens, at least one, from those that are not clipped
    already and whose covariance lies between the bounds. It is drawn by a hash of each token's own numbers, so that a
    resumed run draws the same tokens.
    """

    eps_clip_low: float
    eps_clip_high: float
    clip_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
        loss = clipped_surrogate(ratio, inputs.advantages, clip_low=self.eps_clip_low, clip_high=self.eps_clip_high)
        return torch.where(self._sampled_elements(inputs), 0.0, loss)

    def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Metrics (B, L) of each token, keyed by the names under which their means are logged."""
        return {"clip_ratio": self._sampled_elements(inputs)}

    def _sampled_elements(self, inputs: LossInputs) -> Tensor:
        ratio = importance_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
        covariance = covariances(inputs)
        eligible = (covariance > self.clip_cov_lb) & (covariance < self.clip_cov_ub) & inputs.mask
        eligible &= ~is_clipped(ratio, inputs.advantages, clip_low=self.eps_clip_low, clip_high=self.eps_clip_high)
        count = max(int(self.clip_ratio * int(inputs.mask.sum())), 1)
        return (
            _smallest_mask(torch.where(eligible, _hashed(inputs.logprobs), torch.inf), count, largest=False) & eligible
        )


@attrs.frozen(kw_only=True)
class KLCovLoss:
    """`"kl_cov"`: -r A, plus `ppo_kl_coef` |log pi - log pi_old| at the `kl_cov_frac` of tokens of highest covariance.

    arXiv:2505.22617. At least one token is penalised.
    """

    kl_cov_frac: float
    ppo_kl_coef: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        """(B, L): the loss of each token, unreduced."""
        loss = -importance_ratio(inputs.logprobs, inputs.old_logprobs) * inputs.advantages
        count = max(int(self.kl_cov_frac * int(inputs.mask.sum())), 1)
        highest = torch.where(inputs.mask, covariances(inputs), -torch.inf)
        penalty = self.ppo_kl_coef * (inputs.logprobs - inputs.old_logprobs).abs()
        return torch.where(_smallest_mask(highest, count, largest=True) & inputs.mask, loss + penalty, loss)


def covariances(inputs: LossInputs) -> Tensor:
    """(A - mean A) (log pi - mean log pi), means over the selected tokens; without gradient. Shape (B, L)."""
    logprobs = inputs.logprobs.detach()
    advantage = inputs.advantages - masked_mean(inputs.advantages, inputs.mask)
    return advantage * (logprobs - masked_mean(logprobs, inputs.mask))


def _smallest_mask(keys: Tensor, count: int, *, largest: bool) -> Tensor:
    """Bool: whether an element is among the first `count` by its key."""
    chosen = torch.zeros(keys.numel(), dtype=torch.bool, device=keys.device)
    chosen[keys.flatten().topk(min(count, keys.numel()), largest=largest).indices] = True
    return chosen.view_as(keys)


def _hashed(values: Tensor) -> Tensor:
    """Pseudorandom numbers from 0 to 2^32, each the hash `lowbias32` of the bits of one value as float32:
    https://nullprogram.com/blog/2018/07/31/. Shapes: the same.
    """
    bits = values.detach().float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return (bits ^ (bits >> 16)).double()
