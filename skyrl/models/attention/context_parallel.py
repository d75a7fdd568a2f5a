"""Context parallelism: several ranks hold one packed row, and each attends from its own tokens to the whole row.

A row is cut into twice as many chunks as there are ranks; a rank has one from the front and one from the back, so that
the causal work of all ranks is about the same. Keys and values of all ranks are gathered for attention (Llama 3,
arXiv:2407.21783, section 3.3.2) and, as in ring attention (arXiv:2310.01889), gathered again in backward instead of
being kept. Each piece of a row attends to its keys block by block, without a mask, and the blocks are joined by their
log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl.models.attention.blocks import AttentionBlock, backward_of, forward_of
from skyrl.models.attention.segments import Segment
from skyrl.models.attention.ulysses import RankGroup

CHUNKS = 2
"""Chunks of a row that each rank has."""


class ContextGroup(RankGroup):
    """The ranks that have chunks of a row from its front and its back."""

    def blocks(self, segments: tuple[Segment, ...], tokens: int) -> tuple[AttentionBlock, ...]:
        """Blocks of attention for the `tokens` of this rank, from segments that cover the row of all ranks."""
        length = tokens // CHUNKS
        result: list[AttentionBlock] = []
        for number, chunk in enumerate((self.rank, CHUNKS * self.size - 1 - self.rank)):
            first = chunk * length
            offset = number * length - first
            result += (
                block for segment in segments for block in _blocks(segment, range(first, first + length), offset)
            )
        return tuple(result)

    def attend(self, segments: tuple[Segment, ...], query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Causal attention of this rank's tokens inside the segments of the whole row.

        Shapes: query (1, heads, T / size, D), key and value (1, kv_heads, T / size, D) -> (1, T / size, heads, D).
        """
        blocks = self.blocks(segments, query.shape[2])
        mixed: Tensor = _ATTENTION(query, key, value, self, blocks, scale)
        return mixed.transpose(1, 2).contiguous()

    def gather(self, own: Tensor) -> Tensor:
        """(1, heads, T / size, D) of each rank -> (1, heads, T, D) in the order of the row."""
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        halves = torch.stack(parts, dim=2).unflatten(3, (CHUNKS, -1))  # (1, heads, ranks, chunks, tokens, D)
        front, back = halves.unbind(3)
        return torch.cat([front, back.flip(2)], dim=2).flatten(2, 3)

    def scatter_sum(self, full: Tensor) -> Tensor:
        """The transpose of `gather`: (1, heads, T, D) of each rank, summed -> (1, heads, T / size, D) of this one."""
        front, back = full.unflatten(2, (CHUNKS * self.size, -1)).chunk(2, dim=2)
        ranks = torch.stack([front, back.flip(2)], dim=3).flatten(3, 4)  # (1, heads, ranks, T / size, D)
        sent = ranks.movedim(2, 0).contiguous()
        dist.all_reduce(sent, group=self.group)
        return sent[self.rank]


def _blocks(segment: Segment, chunk: range, offset: int) -> Iterator[AttentionBlock]:
    """Blocks for the queries of a chunk that lie in the segment; `offset` converts row positions to this rank's."""
    for before, part in segment.sequences:
        own = range(max(part.start, chunk.start), min(part.stop, chunk.stop))
        if not own:
            continue
        queries = slice(own.start + offset, own.stop + offset)
        for seen in (before, range(part.start, own.start)):
            if seen:
                yield AttentionBlock(queries=queries, keys=slice(seen.start, seen.stop), causal=False)
        yield AttentionBlock(queries=queries, keys=slice(own.start, own.stop), causal=True)


class _ContextAttention(torch.autograd.Function):
    """Attention over the keys of all ranks that keeps only this rank's tensors for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: ContextGroup,
        blocks: tuple[AttentionBlock, ...],
        scale: float,
    ) -> Tensor:
        mixed, norms = forward_of(blocks, query, group.gather(key), group.gather(value), scale)
        ctx.save_for_backward(query, key, value, mixed, norms)
        ctx.group, ctx.blocks, ctx.scale = group, blocks, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, norms = ctx.saved_tensors
        group: ContextGroup = ctx.group
        inputs = (query, group.gather(key), group.gather(value))
        for_query, for_key, for_value = backward_of(ctx.blocks, gradient, *inputs, mixed, norms, ctx.scale)
        return for_query, group.scatter_sum(for_key), group.scatter_sum(for_value), None, None, None


_ATTENTION: Any = _ContextAttention.apply
