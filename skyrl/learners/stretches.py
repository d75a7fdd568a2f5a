"""The selected tokens of a row that a rank reads, if several ranks each compute a stretch of the row."""

from __future__ import annotations

from typing import Self

import attrs
import torch
from torch import Tensor

from skyrl.batch import to_device
from skyrl.models.attention.shared_rows import SequenceGroup


@attrs.frozen(kw_only=True, eq=False)
class Stretch:
    """The n of the N selected tokens of a row that are predicted in this rank's stretch."""

    group: SequenceGroup

    own: Tensor
    """(n,) int64: indices of these tokens among the N."""

    most: int
    """The largest n of any rank, at least 1."""

    positions: Tensor
    """(N,) int64: index of each selected token in (ranks x most,), where the values of all ranks are concatenated."""

    @classmethod
    def of(cls, readers: Tensor, group: SequenceGroup) -> Self:
        """The stretch of this rank; `readers` (N,) int64 is the rank that reads each selected token."""
        of_rank = torch.nn.functional.one_hot(readers, group.size)  # (N, ranks)
        number = of_rank.cumsum(0).gather(1, readers.unsqueeze(1)).squeeze(1) - 1  # among those of the same rank
        most = max(int(of_rank.sum(0).max()), 1)
        own = (readers == group.rank).nonzero().squeeze(1)
        return cls(group=group, own=own, most=most, positions=readers * most + number)

    def join(self, values: Tensor) -> Tensor:
        """(n, ...) of this rank's tokens -> (N, ...) of all. Collective: every rank must call it, also with n = 0."""
        padding = values.new_zeros((self.most - len(values), *values.shape[1:]))
        return self.group.gather(torch.cat([values, padding]))[self.positions]

    def to(self, device: torch.device) -> Self:
        """The stretch on another device; the host does not wait for the copy."""
        return attrs.evolve(self, own=to_device(self.own, device), positions=to_device(self.positions, device))
