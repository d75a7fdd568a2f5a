"""The order of prompts in an epoch, as a function of (seed, epoch): nothing of it has to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl.errors import DataError

Indices = NDArray[np.int64]


class Order(Protocol):
    """Epochs of equal length, each a list of indices of prompts."""

    def __len__(self) -> int:
        """Prompts in an epoch."""

    def epoch(self, number: int) -> Indices:
        """The prompts of this epoch, counted from 0, in order."""


class Shuffled:
    """Every prompt once in an epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int) -> Indices:
        """A permutation."""
        return np.random.default_rng([self._seed, number]).permutation(self._count)


class InOrder:
    """Every row once in an epoch, as they stand."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int) -> Indices:
        """Indices in the order of the file, the same in every epoch."""
        return np.arange(self._count)


class Mixed:
    """Sources by weight: so many prompts of each in an epoch, at random places.

    A source goes through its prompts in passes of its own, shuffled anew for each: none is taken a second time before
    all were taken once, over the borders of epochs, too.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`sizes` are prompts of each source, which stand one after the other. Raises `DataError` for a source that
        has none, or no prompt in an epoch.
        """
        self._sizes, self._seed = tuple(sizes), seed
        if 0 in self._sizes:
            raise DataError(f"source {self._sizes.index(0)} of data.train_data has no prompt, but a weight")
        self.shares = apportioned(sum(sizes), weights)
        if 0 in self.shares:
            raise DataError(
                f"data.train_weights: source {self.shares.index(0)} gets none of the {sum(sizes)} prompts of an epoch; "
                "raise its weight"
            )

    def __len__(self) -> int:
        return sum(self._sizes)

    def epoch(self, number: int) -> Indices:
        """Indices of one epoch: the configured number from each source, in random places."""
        labels = np.repeat(np.arange(len(self._sizes)), self.shares)
        labels = np.random.default_rng([self._seed, number]).permutation(labels)
        order = np.empty(len(labels), dtype=np.int64)
        for source, share in enumerate(self.shares):
            order[labels == source] = self._drawn(source, number * share, share)
        return order

    def _drawn(self, source: int, start: int, count: int) -> Indices:
        """The `count` indices that the source gives after `start` draws."""
        size, first = self._sizes[source], sum(self._sizes[:source])
        begin, end = start // size, (start + count - 1) // size
        passes = [
            np.random.default_rng([self._seed, source, number, 1]).permutation(size) for number in range(begin, end + 1)
        ]
        drawn = np.concatenate(passes)[start - begin * size :][:count]
        return first + drawn


def apportioned(whole: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`whole` in parts as the weights are, by largest remainders; earlier ones first where these are equal."""
    exact = [whole * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda place: parts[place] - exact[place])
    for place in by_remainder[: whole - sum(parts)]:
        parts[place] += 1
    return tuple(parts)
