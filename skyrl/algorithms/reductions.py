"""From per-token losses to one number: the share of each token in the mini-batch.

A reduction is a tensor of weights, computed once over the whole mini-batch; the loss is the sum of weight x loss.
Splitting the mini-batch, padding it or packing it therefore changes neither the loss nor its gradient.
"""

from __future__ import annotations

from torch import Tensor


def token_mean(mask: Tensor) -> Tensor:
    """Every token of the mini-batch counts the same: DAPO's token-level loss, arXiv:2503.14476, section 3.3.

    Shapes: `mask` (B, L) bool, the weights (B, L) float32 with sum 1, or 0 if the mask is empty.
    """
    return mask.float() / mask.sum().clamp(min=1)


def sequence_mean(mask: Tensor) -> Tensor:
    """The mean over answers of the mean over their tokens: every answer counts the same, GRPO's original loss.

    arXiv:2402.03300, eq. 3. An answer without tokens keeps its share, at loss 0. Shapes as in `token_mean`.
    """
    return mask.float() / mask.sum(dim=1, keepdim=True).clamp(min=1) / mask.shape[0]
