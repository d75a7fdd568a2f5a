"""The order of prompts in an epoch, as a function of (seed, epoch): it does not have to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl.errors import DataError

Indices = NDArray[np.int64]


class Order(Protocol):
    """Epochs of equal length, each a list of indices of prompts."""

    def __len__(self) -> int:
        """Number of prompts in an epoch."""

    def epoch(self, number: int) -> Indices:
        """The prompts of this epoch, counted from 0, in order."""


class Shuffled:
    """Shuffles the prompts of each epoch; every prompt occurs once per epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int) -> Indices:
        """Random permutation of all indices, determined by seed and epoch."""
        return np.random.default_rng([self._seed, number]).permutation(self._count)


class Sequential:
    """Keeps the order of the data; every row occurs once per epoch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int) -> Indices:
        """Indices in the order of the file, the same in every epoch."""
        return np.arange(self._count)


class Mixed:
    """Mixes sources by weight: each epoch has a fixed number of prompts from each source, at random places.

    Each source is read in separate passes, reshuffled for each pass: no prompt repeats before all prompts of its source
    were used, even across epochs.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`sizes` are the numbers of prompts of the sources, which are concatenated. Raises `DataError` for a source
        without prompts, or with too little weight for one prompt per epoch.
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
        """Indices of one epoch: the configured number from each source, at random places."""
        labels = np.repeat(np.arange(len(self._sizes)), self.shares)
        labels = np.random.default_rng([self._seed, number]).permutation(labels)
        order = np.empty(len(labels), dtype=np.int64)
        for source, (size, share) in enumerate(zip(self._sizes, self.shares, strict=True)):
            start = number * share  # draws from the source in the epochs before
            begin, end = start // size, (start + share - 1) // size
            passes = [pass_of_source(self._seed, source, index, size) for index in range(begin, end + 1)]
            drawn = np.concatenate(passes)[start - begin * size :][:share]
            order[labels == source] = sum(self._sizes[:source]) + drawn
        return order


@lru_cache(maxsize=16)
def pass_of_source(seed: int, source: int, number: int, size: int) -> Indices:
    """Random permutation of the `size` rows of a source for its pass of this number."""
    return np.random.default_rng([seed, source, number, 1]).permutation(size)


def apportioned(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` in proportion to the weights, by largest remainders; on ties, earlier parts come first."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)
