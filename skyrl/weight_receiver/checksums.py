"""Digests that are computed on the device of a tensor, so that weights need not leave the GPU to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

_CHUNK_BYTES = 2**25
"""Number of bytes hashed at a time: mixing needs a few times as much memory."""

GAMMA, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""SplitMix64's 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers: torch has no arithmetic
on uint64."""


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
        total += mixed_in_place(mixed.mul_(GAMMA).add_(words)).sum()
    return total


def digest_words(tensors: Sequence[Tensor]) -> Tensor:
    """Digests of several tensors of one device as (N,) int64 there: those of `digest_word`, in one computation, because
    a GPU takes as long to begin an operation as to hash a small tensor.
    """
    contents = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors]
    words = [_words(content) for content in contents]
    lengths = torch.tensor([word.numel() for word in words])
    ends, sizes = lengths.cumsum(0), torch.tensor([content.numel() for content in contents])
    device, total = contents[0].device, int(ends[-1])
    lengths, begins, ends, sizes = torch.stack((lengths, ends - lengths, ends, sizes)).to(device, non_blocking=True)
    positions = torch.arange(1, total + 1, device=device)
    positions -= torch.repeat_interleave(begins, lengths, output_size=total)
    sums = torch.cat((begins.new_zeros(1), mixed_in_place(positions.mul_(GAMMA).add_(torch.cat(words))).cumsum(0)))
    digests: Tensor = sizes + sums[ends] - sums[begins]
    return digests


class Digests:
    """Digests of tensors by name, hashed many at a time, on the CUDA stream on which they were added."""

    def __init__(self) -> None:
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0
        self._stream: torch.cuda.Stream | None = None
        self._names: list[str] = []
        self._words: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Hash a tensor of any shape: at once if it `is_hashed_at_once`, otherwise soon, together with others. It must
        keep its content until then, or until `flush`. Raises ValueError for a name that is there already.
        """
        if name in self._pending or name in self._names:
            raise ValueError(f"{name} is there already")
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        if stream != self._stream or self._bytes + tensor.nbytes > _CHUNK_BYTES:
            self.flush()
        self._stream = stream
        self._pending[name] = tensor
        self._bytes += tensor.nbytes
        if is_hashed_at_once(tensor.nbytes):
            self.flush()

    def flush(self) -> None:
        """Hash what was added, without waiting for a GPU."""
        pending, self._pending, self._bytes = self._pending, {}, 0
        if not pending:
            return
        tensors = list(pending.values())
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            self._words.append(digest_words(tensors) if len(tensors) > 1 else digest_word(tensors[0]).view(1))
        self._names += pending

    def in_hex(self) -> dict[str, str]:
        """Digests by name as 16 hexadecimal digits each, copied from their device in one transfer."""
        self.flush()
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)
        return in_hex(dict(zip(self._names, torch.cat(self._words), strict=True))) if self._words else {}


def is_hashed_at_once(size: int) -> bool:
    """Whether `Digests` hashes a tensor of `size` bytes when it is added, because it is large enough to be alone."""
    return size >= _CHUNK_BYTES


def in_hex(words: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests by name as 16 hexadecimal digits each, copied from their device in one transfer."""
    if not words:
        return {}
    numbers: list[int] = torch.stack(list(words.values())).tolist()
    return {name: f"{word % 2**64:016x}" for name, word in zip(words, numbers, strict=True)}


def _words(content: Tensor) -> Tensor:
    """Bytes as 8-byte words, the last one padded with zeros; a copy if the bytes are unaligned or need padding."""
    if content.numel() % 8 == 0 and content.storage_offset() % 8 == 0:
        return content.view(torch.int64)
    padded = torch.zeros(-(-content.numel() // 8) * 8, dtype=torch.uint8, device=content.device)
    padded[: content.numel()] = content
    return padded.view(torch.int64)


def mixed_in_place(words: Tensor) -> Tensor:
    """Applies SplitMix64's mixing function to int64 of any shape. Their multiplication wraps on every device. The
    numbers that samples are drawn with are mixed by it, too (`skyrl/inference/draws.py`).
    """
    words.bitwise_xor_(shifted(words, 30)).mul_(_FIRST)
    words.bitwise_xor_(shifted(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(shifted(words, 31))


def shifted(words: Tensor, bits: int) -> Tensor:
    """Right shift of int64 of any shape that fills with zeros; torch's own repeats the sign bit."""
    return torch.bitwise_right_shift(words, bits).bitwise_and_(2 ** (64 - bits) - 1)
