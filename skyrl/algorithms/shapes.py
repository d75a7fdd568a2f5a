"""Errors about tensors whose shapes do not belong together, or that hold non-finite values."""

from __future__ import annotations

import torch
from torch import Tensor


def expect_same_shape(**tensors: Tensor) -> None:
    """All have the shape of the first. Raises ValueError that names the first that has not."""
    (first, wanted), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != wanted.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {first} {tuple(wanted.shape)}")


def expect_finite(**tensors: Tensor) -> None:
    """No NaN and no infinity. Raises ValueError that names the tensor, the place and the value."""
    for name, tensor in tensors.items():
        wrong = ~torch.isfinite(tensor)
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            raise ValueError(f"{name}{place} is {tensor[tuple(place)].item()}: only finite numbers can be compared")
