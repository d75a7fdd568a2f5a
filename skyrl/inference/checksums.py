"""A digest that is computed where the tensor lives, so that weights need not leave the GPU to be compared."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_BYTES = 2**25
"""Bytes of a tensor that are hashed at a time: mixing needs a few times as much memory."""

_GAMMA, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers."""


def device_digest(tensor: Tensor) -> str:
    """64 bits over the bytes of a tensor of any shape and their places: the sum of SplitMix64 (Steele, Lea and Flood
    2014, doi:10.1145/2660193.2660195) over words of 8 bytes, each offset by its place. The same on every device.

    A change within one word always shows, since SplitMix64 is one-to-one; any other is missed once in 2**64. It finds
    accidents, not enemies.
    """
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.tensor(content.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), _CHUNK_BYTES):
        part = content[start : start + _CHUNK_BYTES]
        padded = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=tensor.device)
        padded[: part.numel()] = part  # a copy: a slice of bytes need not begin where a word may
        words = padded.view(torch.int64)
        places = torch.arange(start // 8 + 1, start // 8 + 1 + words.numel(), device=tensor.device)
        total += _mixed(words + places * _GAMMA).sum()
    return f"{total.item() % 2**64:016x}"


def _mixed(words: Tensor) -> Tensor:
    """Multiplication of int64 wraps, on every device."""
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return torch.bitwise_xor(words, _shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros; torch fills with the sign."""
    return torch.bitwise_and(torch.bitwise_right_shift(words, bits), 2 ** (64 - bits) - 1)
