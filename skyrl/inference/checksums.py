"""Digests that are computed on the device of a tensor, so that weights need not leave the GPU to be compared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_CHUNK_BYTES = 2**25
"""Number of bytes of a tensor hashed at a time: mixing needs a few times as much memory."""

_GAMMA, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers."""


def digest_word(tensor: Tensor) -> Tensor:
    """Digest of a tensor of any shape as () int64 on its device: the sum of SplitMix64 (Steele, Lea and Flood 2014,
    doi:10.1145/2660193.2660195) over words of 8 bytes, each offset by its position. It is the same on every device, and
    the host does not wait for it.

    A change within one word is always detected, since SplitMix64 is one-to-one; any other is missed with probability
    2**-64. The digest detects accidental changes, not attacks.
    """
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.full((), content.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), _CHUNK_BYTES):
        words = _words(content[start : start + _CHUNK_BYTES])
        mixed = torch.arange(start // 8 + 1, start // 8 + 1 + words.numel(), device=tensor.device)
        total += _mix(mixed.mul_(_GAMMA).add_(words)).sum()
    return total


def in_hex(words: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests by name as 16 hexadecimal digits each, copied from their device in one transfer."""
    if not words:
        return {}
    found: list[int] = torch.stack(list(words.values())).tolist()
    return {name: f"{word % 2**64:016x}" for name, word in zip(words, found, strict=True)}


def _words(content: Tensor) -> Tensor:
    """Bytes as 8-byte words, the last one padded with zeros; a copy if the bytes are unaligned or need padding."""
    if content.numel() % 8 == 0 and content.storage_offset() % 8 == 0:
        return content.view(torch.int64)
    padded = torch.zeros(-(-content.numel() // 8) * 8, dtype=torch.uint8, device=content.device)
    padded[: content.numel()] = content
    return padded.view(torch.int64)


def _mix(words: Tensor) -> Tensor:
    """Applies SplitMix64's mixing function in place. Multiplication of int64 wraps on every device."""
    words.bitwise_xor_(_shifted(words, 30)).mul_(_FIRST)
    words.bitwise_xor_(_shifted(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's own repeats the sign bit."""
    return torch.bitwise_right_shift(words, bits).bitwise_and_(2 ** (64 - bits) - 1)
