"""Sequences whose rows are read when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, overload

R = TypeVar("R")


class RowsOnAccess(Sequence[R], Generic[R]):
    """Rows by place; a subclass defines their number, and how one of them is read."""

    @abstractmethod
    def read_row(self, place: int) -> R:
        """The row at a place, counted from 0, which exists."""

    @overload
    def __getitem__(self, place: int) -> R: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[R, ...]: ...

    def __getitem__(self, place: int | slice) -> R | tuple[R, ...]:
        places = range(len(self))[place]
        return self.read_row(places) if isinstance(places, int) else tuple(map(self.read_row, places))
