"""The ranks that share packed rows: which rank has which tokens, and how they attend together.

Outside attention tokens are independent, so that each rank computes its own. Two ways lead through attention, and both
together cut a row twice (arXiv:2405.07719):

- Sequence parallelism (Ulysses, arXiv:2309.14509): each rank has a stretch of the row, and inside attention the whole
  row for some of the heads. One all-to-all before attention exchanges stretches for heads, one after it restores the
  stretches. The attention function itself is unchanged.
- Context parallelism: a row is cut into twice as many chunks as there are ranks; a rank has one from the front and one
  from the back, so that the causal work of all ranks is about the same. Keys and values of all ranks are gathered for
  attention (Llama 3, arXiv:2407.21783, section 3.3.2) and, as in ring attention (arXiv:2310.01889), gathered again in
  backward instead of being kept. Each piece of a row attends to its keys block by block, without a mask, and the blocks
  are joined by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import lcm, prod
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl.models.attention.blocks import AttentionBlock, backward_of, forward_of
from skyrl.models.attention.segments import Segment

CHUNKS = 2
"""Chunks of a row that each rank has under context parallelism."""


@frozen(eq=False)
class RankGroup:
    """The ranks that divide the tokens of a row, from the view of one of them."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.group.size()


class SequenceGroup(RankGroup):
    """The ranks that share sequences: rank n has the n-th stretch of a row."""

    def whole_rows(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of this rank's stretch, all heads -> of the whole row, this rank's heads.

        Shapes: (1, heads, T / size, D) -> (1, heads / size, T, D). Keys and values of fewer heads than ranks are
        repeated, so that every rank has those that its queries attend to.
        """
        repeats = lcm(key.shape[1], self.size) // key.shape[1]
        if repeats > 1:
            key, value = (element.repeat_interleave(repeats, dim=1) for element in (key, value))
        pieces = [item[0].unflatten(0, (self.size, -1)) for item in (query, key, value)]
        exchanged = self._exchange(pieces)
        query, key, value = (entry.transpose(0, 1).flatten(1, 2).unsqueeze(0) for entry in exchanged)
        return query, key, value

    def local_stretch(self, mixed: Tensor) -> Tensor:
        """Output of attention for the whole row, this rank's heads -> for this rank's stretch, all heads.

        Shapes: (1, T, heads / size, D) -> (1, T / size, heads, D).
        """
        [exchanged] = self._exchange([mixed[0].unflatten(0, (self.size, -1))])
        return exchanged.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def gather(self, own: Tensor) -> Tensor:
        """(n, ...) of every rank, of equal shapes -> (size x n, ...). Every rank must compute the same loss from the
        result: backward returns only this rank's part of the gradient and sums nothing over ranks.
        """
        gathered: Tensor = _GATHER(own, self.group)
        return gathered

    def _exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Send the n-th part of each piece (size, ...) to rank n, all pieces in one exchange."""
        sent = torch.cat([piece.flatten(1) for piece in pieces], dim=1)
        received: Tensor = _ALL_TO_ALL(sent, self.group)
        parts = received.split([prod(piece.shape[1:]) for piece in pieces], dim=1)
        return [part.unflatten(1, piece.shape[1:]) for part, piece in zip(parts, pieces, strict=True)]


class _AllToAll(torch.autograd.Function):
    """Sends part n of every rank's tensor to rank n. The operation is its own transpose."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = sent.contiguous()  # gloo writes wrong numbers into a result of another layout
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].chunk(ctx.group.size())[ctx.group.rank()], None


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


@frozen(kw_only=True, eq=False)
class RowSharing:
    """The ranks that share packed rows, from the view of one of them."""

    everyone: SequenceGroup
    """All of these ranks, with the ranks of one sequence group next to each other."""

    sequence: SequenceGroup | None = None
    """The ranks that exchange tokens for heads."""

    context: ContextGroup | None = None
    """The ranks that gather keys and values, one of each sequence group."""

    def order(self, tokens: int) -> Tensor:
        """(ranks x n,) int64: columns of a row of `tokens`, larger numbers for padding; the n columns of the first
        rank, then the n of the second, and so on.
        """
        if self.context is None:
            return torch.arange(-(-tokens // self.everyone.size) * self.everyone.size)
        chunks, pieces = CHUNKS * self.context.size, CHUNKS * self.everyone.size
        columns = torch.arange(-(-tokens // pieces) * pieces).view(chunks, -1)
        front, back = columns.chunk(2)
        return torch.stack([front, back.flip(0)], dim=1).flatten()

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: tuple[Segment, ...],
        scale: float,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Attention of this rank's tokens inside `segments`, which cover the row of all ranks; `attention` is that
        of a rank with the whole row.

        Shapes: query (1, heads, n, D), key and value (1, kv_heads, n, D) -> (1, n, heads, D).
        """
        if self.sequence is not None:
            query, key, value = self.sequence.whole_rows(query, key, value)
        if self.context is not None:
            mixed = self.context.attend(segments, query, key, value, scale)
        else:
            mixed = attention(query, key, value)
        return mixed if self.sequence is None else self.sequence.local_stretch(mixed)


_ALL_TO_ALL: Any = _AllToAll.apply
_GATHER: Any = _Gather.apply
_ATTENTION: Any = _ContextAttention.apply
