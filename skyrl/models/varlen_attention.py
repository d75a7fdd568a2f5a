"""Attention inside the segments of a packed row by one call of torch's variable-length FlashAttention kernels.

The kernels come with torch's CUDA builds (`torch.nn.attention.varlen`), read 16-bit numbers, and take no mask:
sequences are told apart by where they begin. Their causal mask is aligned with the last query and the last key, so that
an answer's queries see all of the keys that stand before the answer's own: those of the prompt, which are gathered once
for each answer, while the prompt's queries are computed once for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from skyrl.models.segments import Segment

AMPERE = (8, 0)
"""Compute capability from which the kernels run."""

LARGEST_HEAD = 256
"""Largest size of a head that they take; it has to be a multiple of 8."""

CAUSAL = (-1, 0)
"""Window of the kernels: any number of keys before a query, and none after it."""


@attrs.frozen(kw_only=True, eq=False)
class Sequences:
    """Queries and keys of a packed row as sequences of their own: each prompt, and each answer behind its prompt."""

    keys: Tensor | None
    """(K,) int64: position in the row of each key, or None where they are those of the row."""

    query_bounds: Tensor
    """(S + 1,) int32: where the queries of each sequence begin, and where the last end."""

    key_bounds: Tensor
    """(S + 1,) int32: the same of the keys."""

    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> Sequences:
        """The sequences of `segments`, found on the host."""
        stretches = list(_sequences(segments))
        queries = [own.stop - own.start for _, own in stretches]
        keys = [len(before) + len(own) for before, own in stretches]
        positions = torch.cat([torch.arange(each.start, each.stop) for pair in stretches for each in pair])
        return cls(
            keys=positions.to(device, non_blocking=True) if sum(keys) > sum(queries) else None,
            query_bounds=_bounds(queries, device),
            key_bounds=_bounds(keys, device),
            longest_query=max(queries),
            longest_key=max(keys),
        )


def _sequences(segments: Sequence[Segment]) -> Iterator[tuple[range, range]]:
    """Positions of the prompt that stands before a sequence, and of the sequence itself."""
    for segment in segments:
        prompt = range(segment.start, segment.start + segment.prompt)
        yield prompt[:0], prompt
        first = prompt.stop
        for tokens in segment.answers:
            yield prompt, range(first, first + tokens)
            first += tokens


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def varlen_attention(sequences: Sequences, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention inside each sequence. Shapes: query (1, heads, T, D), key and value (1, kv_heads, T, D), all of
    one 16-bit type -> (1, T, heads, D).
    """
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    if sequences.keys is not None:
        key, value = key[sequences.keys], value[sequences.keys]
    kernel = _kernel()
    told = {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in _arguments(kernel) else {}
    mixed: Tensor = kernel(
        query,
        key,
        value,
        sequences.query_bounds,
        sequences.key_bounds,
        sequences.longest_query,
        sequences.longest_key,
        scale=scaling,
        window_size=CAUSAL,
        **told,  # torch 2.11 shares heads of keys and values without being told
    )
    return mixed.unsqueeze(0)


@cache
def has_varlen_kernels(device: torch.device) -> bool:
    """Does this build of torch have the kernels, for this GPU?"""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    try:
        taken = _arguments(_kernel())
    except ImportError:
        return False
    return "window_size" in taken and torch.cuda.get_device_capability(device) >= AMPERE


@cache
def _arguments(kernel: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


def _kernel() -> Any:
    from torch.nn.attention.varlen import varlen_attn  # younger than the oldest torch that skyrl runs with

    return varlen_attn
