"""The ranks that share packed rows: which rank has which tokens, and how they attend together.

Sequence parallelism exchanges tokens for heads around attention (`ulysses.py`); context parallelism gathers the keys
and values that a rank's tokens see (`context_parallel.py`). Both together cut a row twice (arXiv:2405.07719).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from skyrl.models.attention.context_parallel import CHUNKS, ContextGroup
from skyrl.models.attention.segments import Segment
from skyrl.models.attention.ulysses import SequenceGroup


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
