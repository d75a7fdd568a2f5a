"""Checks that tensors have one shape and hold finite values."""

from __future__ import annotations

import torch
from torch import Tensor


def expect_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError, naming the tensor, unless all have the shape of the first."""
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != reference.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {first} {tuple(reference.shape)}")


def expect_finite(**tensors: Tensor) -> None:
    """Raises ValueError for NaN or infinity, naming the tensor, the position and the value."""
    for name, tensor in tensors.items():
        wrong = ~torch.isfinite(tensor)
        if wrong.any():
            index = wrong.nonzero()[0].tolist()
            raise ValueError(f"{name}{index} is {tensor[tuple(index)].item()}: only finite numbers can be compared")
