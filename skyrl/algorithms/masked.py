"""Statistics over the selected numbers of a tensor. Values outside the mask are never touched, NaN included."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the selected numbers, all of them or along one dimension; 0 if none is selected.

    Shapes: `values` and `mask` the same; the result a scalar, or without dimension `dim`.
    """
    chosen = torch.where(mask, values, 0.0)
    if dim is None:
        return chosen.sum() / mask.sum().clamp(min=1)
    return chosen.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of the selected numbers; 0 if fewer than two are selected, or all are equal.

    Shapes: `values` and `mask` the same; the result a scalar of the type of `values`.
    """
    return _unbiased(_centered(values[mask])).to(values.dtype)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the selected numbers, 0 elsewhere; var is the unbiased variance.

    Equal numbers, and a single number, become exactly 0. Shapes: both inputs and the result the same.
    """
    centered = _centered(values[mask])
    return _scatter(centered * torch.rsqrt(_unbiased(centered) + 1e-8), values, mask)


def standardize(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(max(var, 1e-8)) over the selected numbers, 0 elsewhere; var is the biased variance.

    Equal numbers become exactly 0. SkyRL takes the mean over everything, padding included, so that its result depends
    on the padding; here mean and variance are over the same numbers. Shapes: both inputs and the result the same.
    """
    centered = _centered(values[mask])
    variance = centered.square().sum() / max(len(centered), 1)
    return _scatter(centered * torch.rsqrt(variance.clamp(min=1e-8)), values, mask)


def _centered(chosen: Tensor) -> Tensor:
    """(N,) -> (N,) float64: numbers minus their mean.

    The sum of equal float32 numbers is exact in float64, and so is their mean. In float32 the rounding of the mean
    would be divided by a deviation that consists of nothing else.
    """
    exact = chosen.double()
    return exact - exact.sum() / max(len(exact), 1)


def _unbiased(centered: Tensor) -> Tensor:
    return centered.square().sum() / max(len(centered) - 1, 1)


def _scatter(chosen: Tensor, like: Tensor, mask: Tensor) -> Tensor:
    """(N,) numbers of the selected places -> the shape and type of `like`, 0 elsewhere."""
    return torch.zeros_like(like).masked_scatter(mask, chosen.to(like.dtype))
