"""Ulysses sequence parallelism (arXiv:2309.14509): several ranks hold one packed row, each a stretch of its tokens.

Outside attention tokens are independent, so that each rank computes its own stretch. Inside attention each rank has the
whole row for some of the heads: one all-to-all before attention exchanges stretches for heads, one after it restores
the stretches. The attention function itself is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor


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


_ALL_TO_ALL: Any = _AllToAll.apply
_GATHER: Any = _Gather.apply
