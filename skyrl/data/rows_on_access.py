"""Sequences whose rows are read when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, overload

R = TypeVar("R")


class RowsOnAccess(Sequence[R], Generic[R]):
    """Rows by place; a subclass defines their number, and how one of them is read."""

    @abstractmethod
    def read_row(self, index: int) -> R:
        """The row at an index, counted from 0, which exists."""

    @overload
    def __getitem__(self, index: int) -> R: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[R, ...]: ...

    def __getitem__(self, index: int | slice) -> R | tuple[R, ...]:
        indices = range(len(self))[index]
        return self.read_row(indices) if isinstance(indices, int) else tuple(map(self.read_row, indices))
