"""Attention inside the segments of a packed row by torch's own kernels for CUDA.

| kernel | for |
|---|---|
| FlashAttention 2 with variable lengths | 16 bits: one call for all sequences |
| cuDNN | 16 bits, long sequences on Hopper and later: one call for each |
| memory-efficient attention with variable lengths (xFormers) | float32, and GPUs or builds without the first |

Kernels with variable lengths accept no mask: sequences are separated by their start positions. Their causal mask is
aligned with the last query and the last key, so that an answer's queries see all keys before the answer's own. These
are the keys of the prompt, which are gathered once for each answer, while the prompt's queries are computed once for
all answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from skyrl.models.attention.segments import Segment, joined_ranges

AMPERE = (8, 0)
"""Least compute capability on which the kernels run."""

LARGEST_HEAD = 256
"""Largest size of a head that the kernels accept; sizes must be multiples of 8."""

HOPPER = (9, 0)
"""Least compute capability on which cuDNN's kernels are about 1.5 times as fast as FlashAttention 2."""

LONG = 8192
"""Number of tokens from which a sequence is worth a plan of cuDNN, which takes 40 ms for each new length."""

PLANNED = 1024
"""Sequences are padded to a multiple of this number of tokens for cuDNN, so that few plans serve all lengths."""

CAUSAL_AT_THE_END = 2
"""Memory-efficient attention's name of the causal mask that is aligned with the last query and the last key."""


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

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all sequences, back to back: (T, kv_heads, D) of the row -> (K, kv_heads, D) each."""
        if self.keys is None:
            return key, value
        both: Any = _Gathered.apply
        gathered: Tensor = both(torch.cat((key, value), 1), self.keys)
        return gathered[:, : key.shape[1]], gathered[:, key.shape[1] :]

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, chunk: int | None = None) -> Sequences:
        """The sequences of `segments`, computed on the host and copied to `device`. With `chunk`, each is cut at the
        multiples of this position, and no piece sees another.
        """
        sequences = (sequence for segment in segments for sequence in segment.sequences)
        stretches = [piece for sequence in sequences for piece in _chunks(*sequence, chunk)]
        queries = [own.stop - own.start for _, own in stretches]
        keys = [len(before) + len(own) for before, own in stretches]
        ranges = torch.tensor([(item.start, len(item)) for pair in stretches for item in pair])
        positions = joined_ranges(ranges[:, 0], ranges[:, 1])
        return cls(
            keys=positions.to(device, non_blocking=True) if sum(keys) > sum(queries) else None,
            query_bounds=_bounds(queries, device),
            key_bounds=_bounds(keys, device),
            longest_query=max(queries),
            longest_key=max(keys),
        )


def _chunks(before: range, own: range, chunk: int | None) -> Iterator[tuple[range, range]]:
    """A sequence as pieces of `chunk` positions, from the position 0 of `before`: the keys before each, and itself."""
    if chunk is None:
        yield before, own
        return
    start = 0
    while start < len(own):
        first = (len(before) + start) // chunk * chunk  # position of the first token of the piece's chunk
        stop = min(first + chunk - len(before), len(own))
        seen = before[first:] if start == 0 else own[:0]
        yield seen, own[start:stop]
        start = stop


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def varlen_attention(
    sequences: Sequences,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    *,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside each sequence, to the last `window` keys. Shapes: query (1, heads, T, D), key and value
    (1, kv_heads, T, D), all of one 16-bit type -> (1, T, heads, D).
    """
    query, key, value = (item[0].transpose(0, 1) for item in (query, key, value))
    mixed, *_ = _flash_attention(
        query,
        *sequences.gathered(key, value),
        sequences.query_bounds,
        sequences.key_bounds,
        sequences.longest_query,
        sequences.longest_key,
        0.0,  # no dropout
        False,  # the window is causal
        False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,  # number of keys before a query; -1: any
        window_size_right=0,  # and none after it
    )
    return mixed.unsqueeze(0)


def _flash_attention(*arguments: object, **options: object) -> tuple[Tensor, ...]:
    """The operator behind `torch.nn.attention.varlen`, whose own wrapper in Python takes 0.2 ms for each call."""
    results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(*arguments, **options)
    return results


def efficient_attention(
    sequences: Sequences, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """Causal attention inside each sequence, in any type. Shapes as for `varlen_attention`."""
    repeats = query.shape[1] // key.shape[1]
    query, key, value = (item[0].transpose(0, 1) for item in (query, key, value))
    key, value = (entry.repeat_interleave(repeats, dim=1) for entry in sequences.gathered(key, value))
    mixed, *_ = torch.ops.aten._efficient_attention_forward(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        None,
        sequences.query_bounds,
        sequences.key_bounds,
        sequences.longest_query,
        sequences.longest_key,
        0.0,
        CAUSAL_AT_THE_END,
        compute_log_sumexp=torch.is_grad_enabled(),
        scale=scaling,
    )
    result: Tensor = mixed
    return result


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention of one sequence. Shapes: query (1, heads, T, D), key and value (1, kv_heads, T, D), all of one
    16-bit type -> (1, heads, T, D).

    The operator is called by name: torch's choice of kernels is one for the whole process, and an engine in this
    process must not plan a kernel for each length of its samples.
    """
    tokens, repeats = query.shape[2], query.shape[1] // key.shape[1]
    missing = -tokens % PLANNED
    query, key, value = (torch.nn.functional.pad(item, (0, 0, 0, missing)) for item in (query, key, value))
    mixed, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query,
        key.repeat_interleave(repeats, dim=1),
        value.repeat_interleave(repeats, dim=1),
        None,
        torch.is_grad_enabled(),
        is_causal=True,
        scale=scaling,
    )
    result: Tensor = mixed[:, :, :tokens]  # a token sees no padding, which comes after it
    return result


def attention_operators() -> list[Any]:
    """The operators that compute attention here."""
    names = ("_scaled_dot_product_cudnn_attention", "_efficient_attention_forward", "_flash_attention_forward")
    return [getattr(torch.ops.aten, name).default for name in names]


@cache
def has_cudnn_attention(device: torch.device) -> bool:
    """Whether cuDNN has fast attention kernels for this device."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cudnn.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER


@cache
def has_varlen_kernels(device: torch.device) -> bool:
    """Whether this build of torch has FlashAttention's kernels for this GPU."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= AMPERE


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    shape: torch.Size


class _Gathered(torch.autograd.Function):
    """Rows of a tensor, some of them several times. Their gradients are added in float32, without sorting the index,
    as torch's own indexing would in every layer.
    """

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,), (gradient,) = ctx.saved_tensors, gradients
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        return total.index_add_(0, index, gradient.float()).to(gradient.dtype), None
