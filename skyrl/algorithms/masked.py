"""Statistics over the selected numbers of a tensor. What stands outside the mask is never touched, NaN included."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the selected numbers, of all or along one dimension; 0 where none is selected.

    Shapes: `values` and `mask` the same; the result a scalar, or without dimension `dim`.
    """
    chosen = torch.where(mask, values, 0.0)
    if dim is None:
        return chosen.sum() / mask.sum().clamp(min=1)
    return chosen.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of the selected numbers, a scalar; 0 where fewer than two are selected."""
    distance = torch.where(mask, values - masked_mean(values, mask), 0.0)
    return distance.square().sum() / (mask.sum() - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the selected numbers, 0 elsewhere; var is the unbiased one.

    Fewer than two numbers have nothing to be compared with and become 0. Shapes: both inputs and the result the same.
    """
    centered = torch.where(mask, values - masked_mean(values, mask), 0.0)
    return centered * torch.rsqrt(masked_var(values, mask) + 1e-8)


def standardize(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(max(var, 1e-8)) over the selected numbers, 0 elsewhere; var is the biased one.

    SkyRL takes the mean over everything, padding included, so that its result depends on the padding; here mean and
    variance are of the same numbers. Shapes: both inputs and the result the same.
    """
    centered = torch.where(mask, values - masked_mean(values, mask), 0.0)
    return centered * torch.rsqrt(masked_mean(centered.square(), mask).clamp(min=1e-8))
