"""Statistics of answers to the same prompt. Groups are identified by number, not by the position of rows.

Everything is summed in double precision: rewards of a group are often equal, and rounding must not separate them.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Groups:
    """The assignment of B answers to groups."""

    member_of: Tensor
    """(B,) int64: each answer's group, counted from 0 without gaps."""

    count: Tensor
    """(G,) float64: answers in each group."""

    @classmethod
    def of(cls, numbers: Tensor) -> Groups:
        """Groups of the answers with equal `numbers` (B,), which may be any integers."""
        _, member_of = torch.unique(numbers, return_inverse=True)
        return cls(member_of, torch.bincount(member_of).double())

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each group: (B,) -> (G,) float64."""
        return torch.zeros_like(self.count).index_add_(0, self.member_of, values.double())

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each group: (B,) -> (G,) float64."""
        return self.sum(values) / self.count

    def spread(self, of_groups: Tensor) -> Tensor:
        """Each answer's value from the values of the groups: (G,) -> (B,)."""
        return of_groups[self.member_of]

    def is_single(self) -> Tensor:
        """(B,) bool: whether the answer is the only one of its group."""
        return self.spread(self.count == 1)

    def range(self, values: Tensor) -> Tensor:
        """(B,) float64: largest minus smallest value of each answer's group; 0 in a group of one."""
        exact = values.double()
        highest = torch.full_like(self.count, -torch.inf).scatter_reduce_(0, self.member_of, exact, "amax")
        lowest = torch.full_like(self.count, torch.inf).scatter_reduce_(0, self.member_of, exact, "amin")
        return self.spread(highest - lowest)

    def centered(self, values: Tensor) -> Tensor:
        """(B,) float64: value minus the mean of its group; exactly 0 if all values of the group are equal."""
        return torch.where(self.range(values) == 0, 0.0, values.double() - self.spread(self.mean(values)))
