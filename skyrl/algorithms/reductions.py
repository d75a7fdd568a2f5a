"""Reductions of per-token losses to one number, as the weight of each token in the mini-batch.

A reduction is a tensor of weights, computed once over the whole mini-batch and before anything is rejected; the loss is
the sum of weight x loss. Splitting the mini-batch, padding it or packing it therefore changes neither the loss nor its
gradient.

Everywhere `mask` is (B, L) bool and the weights are (B, L) float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl.algorithms.groups import Groups


def token_mean(mask: Tensor) -> Tensor:
    """Every token of the mini-batch counts the same: DAPO's token-level loss, arXiv:2503.14476, section 3.3.

    The weights sum to 1, or to 0 if the mask is empty. Shapes: `mask` (B, L) bool, the weights (B, L).
    """
    return mask.float() / mask.sum().clamp(min=1)


def sequence_mean(mask: Tensor) -> Tensor:
    """The mean over answers of the mean over their tokens: every answer counts the same, GRPO's original loss.

    arXiv:2402.03300, eq. 3. An answer without tokens keeps its share, at loss 0. Shapes: `mask` (B, L) bool, the
    weights (B, L).
    """
    return mask.float() / mask.sum(dim=1, keepdim=True).clamp(min=1) / mask.shape[0]


def sequence_sum_by_length(mask: Tensor, *, length: int) -> Tensor:
    """The mean over answers of the sum over their tokens, divided by one length for all.

    Dr. GRPO, arXiv:2503.20783, section 3.2: the loss favours neither short nor long answers. `length` is in tokens.
    Shapes: `mask` (B, L) bool, the weights (B, L).
    """
    return mask.float() / (mask.shape[0] * length)


def prompt_mean(mask: Tensor, groups: Tensor) -> Tensor:
    """The mean over prompts of the mean over the tokens of all their answers. `groups` (B,) numbers the prompts."""
    known = Groups.of(groups)
    tokens = known.spread(known.sum(mask.sum(1))).clamp(min=1)
    return (mask / (tokens * len(known.count)).unsqueeze(1)).float()


def mean_of_block_means(mask: Tensor, *, rows: int) -> Tensor:
    """The mean over blocks of `rows` consecutive answers of the mean over the tokens of the block.

    This equals dividing by the tokens of each micro-batch: the weight of a token depends on its neighbours. The size of
    blocks is configured; it does not depend on how rows are dealt to ranks and packed. Shapes: `mask` (B, L) bool, the
    weights (B, L).
    """
    blocks = torch.arange(mask.shape[0], device=mask.device) // rows
    return prompt_mean(mask, blocks)
