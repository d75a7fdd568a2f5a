"""Attention inside the segments of a packed row by one call of torch's variable-length FlashAttention kernels.

The kernels come with torch's CUDA builds (`torch.nn.attention.varlen`), take 16-bit numbers, and accept no mask:
sequences are separated by their start positions. Their causal mask is aligned with the last query and the last key, so
that an answer's queries see all keys before the answer's own. These are the keys of the prompt, which are gathered once
for each answer, while the prompt's queries are computed once for all answers.
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
"""Least compute capability on which the kernels run."""

LARGEST_HEAD = 256
"""Largest size of a head that the kernels accept; sizes must be multiples of 8."""

CAUSAL = (-1, 0)
"""Window of the kernels: any number of keys before a query, and none after it."""


@attrs.frozen(kw_only=True, eq=False)
class Sequences:
    """Queries and keys of a packed row as separate sequences: each prompt, and each answer after its prompt."""

    keys: Tensor | None
    """(K,) int64: position of each key in the row. None: the keys are those of the row, in order."""

    query_bounds: Tensor
    """(S + 1,) int32: start of the queries of each sequence, and end of the last."""

    key_bounds: Tensor
    """(S + 1,) int32: start of the keys of each sequence, and end of the last."""

    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> Sequences:
        """The sequences of `segments`, computed on the host and copied to `device`."""
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
    """Positions of the prompt before each sequence, and of the sequence itself."""
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
        **told,  # torch 2.11 shares heads of keys and values without this argument
    )
    return mixed.unsqueeze(0)


@cache
def has_varlen_kernels(device: torch.device) -> bool:
    """Whether this build of torch has the kernels for this GPU."""
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
    from torch.nn.attention.varlen import varlen_attn  # not in the oldest supported torch

    return varlen_attn
