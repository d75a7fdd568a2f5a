"""Pairs of a better and a worse answer, ranked lists, and single answers with labels, as tokens in memory and as bytes
of a file.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from skyrl.chats.masks import Ids, Mask

_ID = np.dtype("<i4")
_SIZE = np.dtype("<i8")


@frozen(kw_only=True, eq=False)
class PairRow:
    """Two sequences that begin with the same prompt, the first of which ends with the better answer."""

    id: str
    chosen: Ids
    rejected: Ids

    chosen_mask: Mask
    """True for each token of the better answer."""

    rejected_mask: Mask
    """True for each token of the worse answer."""

    ref_logprobs: NDArray[np.float32] | None = None
    """Log-probabilities of the tokens of both answers under the reference, the better one first. None: they have not
    been computed. Not stored with the row."""

    @property
    def sides(self) -> tuple[tuple[Ids, Mask], ...]:
        """Both sequences with their masks, the better one first."""
        return (self.chosen, self.chosen_mask), (self.rejected, self.rejected_mask)

    @property
    def length(self) -> int:
        """Length of the longer sequence, in tokens."""
        return max(len(self.chosen), len(self.rejected))

    @property
    def answer_tokens(self) -> int:
        """Number of tokens of both answers."""
        return int(self.chosen_mask.sum() + self.rejected_mask.sum())

    def to_bytes(self) -> bytes:
        """Everything that training depends on: the length of the better sequence, both sequences, and a byte of mask
        for each token.
        """
        ids = np.concatenate([self.chosen, self.rejected]).astype(_ID).tobytes()
        mask = np.concatenate([self.chosen_mask, self.rejected_mask]).tobytes()
        return np.array([len(self.chosen)], _SIZE).tobytes() + ids + mask

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> PairRow:
        """The row that `to_bytes` wrote."""
        count = int(np.frombuffer(data, _SIZE, 1)[0])
        tokens = (len(data) - _SIZE.itemsize) // (_ID.itemsize + 1)
        ids = np.frombuffer(data, _ID, tokens, _SIZE.itemsize).astype(np.int64)
        mask = np.frombuffer(data, np.bool_, tokens, _SIZE.itemsize + tokens * _ID.itemsize)
        return cls(
            id=row_id, chosen=ids[:count], rejected=ids[count:], chosen_mask=mask[:count], rejected_mask=mask[count:]
        )


@frozen(kw_only=True, eq=False)
class RankedRow:
    """Sequences that begin with the same prompt, from the one with the best answer to the one with the worst."""

    id: str
    sides: tuple[tuple[Ids, Mask], ...]
    """Each sequence, and a mask that is true for each token of its answer."""

    ref_logprobs: NDArray[np.float32] | None = None
    """Log-probabilities of the tokens of all answers under the reference, in this order. None: they have not been
    computed. Not stored with the row."""

    @property
    def length(self) -> int:
        """Length of the longest sequence, in tokens."""
        return max(len(ids) for ids, _ in self.sides)

    @property
    def answer_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(int(mask.sum()) for _, mask in self.sides)

    def to_bytes(self) -> bytes:
        """Everything that training depends on: the number of sequences, their lengths, their tokens, and a byte of mask
        for each token.
        """
        sizes = np.array([len(self.sides), *(len(ids) for ids, _ in self.sides)], _SIZE).tobytes()
        ids = np.concatenate([ids for ids, _ in self.sides]).astype(_ID).tobytes()
        return sizes + ids + np.concatenate([mask for _, mask in self.sides]).tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> RankedRow:
        """The row that `to_bytes` wrote."""
        count = int(np.frombuffer(data, _SIZE, 1)[0])
        sizes = np.frombuffer(data, _SIZE, count, _SIZE.itemsize)
        tokens, begins = int(sizes.sum()), (1 + count) * _SIZE.itemsize
        ids = np.frombuffer(data, _ID, tokens, begins).astype(np.int64)
        mask = np.frombuffer(data, np.bool_, tokens, begins + tokens * _ID.itemsize)
        ends = np.cumsum(sizes)[:-1]
        return cls(id=row_id, sides=tuple(zip(np.split(ids, ends), np.split(mask, ends), strict=True)))


@frozen(kw_only=True, eq=False)
class LabelledRow:
    """A sequence that ends with an answer, and whether that is good."""

    id: str
    token_ids: Ids

    mask: Mask
    """True for each token of the answer."""

    label: bool
    ref_logprobs: NDArray[np.float32] | None = None
    """Log-probabilities of the tokens of the answer under the reference. None: they have not been computed. Not stored
    with the row."""

    @property
    def length(self) -> int:
        """Length of the sequence in tokens."""
        return len(self.token_ids)

    @property
    def answer_tokens(self) -> int:
        """Number of tokens of the answer."""
        return int(self.mask.sum())

    def to_bytes(self) -> bytes:
        """Everything that training depends on: the label, the tokens, and a byte of mask for each."""
        return np.array([self.label]).tobytes() + self.token_ids.astype(_ID).tobytes() + self.mask.tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> LabelledRow:
        """The row that `to_bytes` wrote."""
        tokens = (len(data) - 1) // (_ID.itemsize + 1)
        ids = np.frombuffer(data, _ID, tokens, 1).astype(np.int64)
        mask = np.frombuffer(data, np.bool_, tokens, 1 + tokens * _ID.itemsize)
        return cls(id=row_id, token_ids=ids, mask=mask, label=bool(data[0]))
