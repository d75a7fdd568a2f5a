"""Rows of supervised training as tokens, in memory and as bytes of a file: sequences with weights, pairs of answers,
ranked lists, and single answers with labels.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from skyrl.chats.masks import Ids, Mask, Weights

ID = np.dtype("<i4")
"""Type of token ids in bytes of rows."""

_SIZE = np.dtype("<i8")
_WEIGHT = np.dtype("<f4")
_WEIGHTED = np.array([-1], ID).tobytes()
"""Marks the bytes of a row with weights other than 0 and 1: no token has this id."""

_TAUGHT = np.array([-2], ID).tobytes()
"""Marks the bytes of a row with the likeliest tokens of a teacher."""


@frozen(kw_only=True, eq=False)
class LikelyTokens:
    """A teacher's likeliest tokens at each of the n learned tokens of a row."""

    ids: NDArray[np.int64]
    """(n, k)."""

    logprobs: NDArray[np.float32]
    """(n, k) in nats."""

    def to_bytes(self) -> bytes:
        """The numbers n and k, the ids and the log-probabilities."""
        return np.array(self.ids.shape, ID).tobytes() + self.ids.astype(ID).tobytes() + self.logprobs.tobytes()

    @classmethod
    def of_bytes(cls, data: bytes) -> tuple[LikelyTokens, bytes]:
        """What `to_bytes` wrote, and the bytes after it."""
        rows, count = (int(item) for item in np.frombuffer(data, ID, 2))
        start, size = 2 * ID.itemsize, rows * count * ID.itemsize
        ids = np.frombuffer(data, ID, rows * count, start).astype(np.int64).reshape(rows, count)
        logprobs = np.frombuffer(data, _WEIGHT, rows * count, start + size).astype(np.float32).reshape(rows, count)
        return cls(ids=ids, logprobs=logprobs), data[start + 2 * size :]


@frozen(kw_only=True, eq=False)
class SupervisedRow:
    """One sequence, with the weight of each token in the loss."""

    id: str
    token_ids: Ids
    weights: Weights
    """Weight of each token: 0 if it is not learned, else 1 unless the row gives its messages other weights."""

    teacher: LikelyTokens | None = None
    """A teacher's likeliest tokens in place of each learned one, if the row stores them."""

    @property
    def loss_mask(self) -> Mask:
        """True for each token that is learned."""
        return self.weights > 0

    @property
    def length(self) -> int:
        """Length of the row in tokens."""
        return len(self.token_ids)

    def to_bytes(self) -> bytes:
        """Everything that training depends on: the tokens, then one byte of mask for each.

        If tokens have weights other than 0 and 1: -1 as a token, the tokens, then four bytes of weight for each. What a
        teacher found likely stands before all, after -2 as a token.
        """
        if self.teacher is not None:
            return _TAUGHT + self.teacher.to_bytes() + evolve(self, teacher=None).to_bytes()
        ids, mask = self.token_ids.astype(ID).tobytes(), self.loss_mask
        if np.array_equal(self.weights, mask):
            return ids + mask.tobytes()
        return _WEIGHTED + ids + self.weights.astype(_WEIGHT).tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> SupervisedRow:
        """The row that `to_bytes` wrote."""
        if data.startswith(_TAUGHT):
            teacher, rest = LikelyTokens.of_bytes(data[len(_TAUGHT) :])
            return evolve(cls.of_bytes(row_id, rest), teacher=teacher)
        start = len(_WEIGHTED) if data.startswith(_WEIGHTED) else 0
        kind = _WEIGHT if start else np.dtype(np.bool_)
        count = (len(data) - start) // (ID.itemsize + kind.itemsize)
        ids = np.frombuffer(data, ID, count, start).astype(np.int64)
        weights = np.frombuffer(data, kind, count, start + count * ID.itemsize).astype(np.float32)
        return cls(id=row_id, token_ids=ids, weights=weights)


@frozen(kw_only=True, eq=False)
class PreferenceRow:
    """Two sequences, the first of which is better."""

    id: str
    chosen: Ids
    rejected: Ids
    margin: float = 0.0
    """Margin by which the better answer should score more; Llama 2, arXiv:2307.09288, eq. 2."""

    @property
    def length(self) -> int:
        """Length of the longer answer, in tokens."""
        return max(len(self.chosen), len(self.rejected))

    def to_bytes(self) -> bytes:
        """Everything that training depends on: the margin, the length of the better sequence, and both."""
        head = np.array([self.margin], "<f8").tobytes() + np.array([len(self.chosen)], _SIZE).tobytes()
        return head + self.chosen.astype(ID).tobytes() + self.rejected.astype(ID).tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> PreferenceRow:
        """The row that `to_bytes` wrote."""
        margin, count = float(np.frombuffer(data, "<f8", 1)[0]), int(np.frombuffer(data, _SIZE, 1, 8)[0])
        ids = np.frombuffer(data, ID, offset=16).astype(np.int64)
        return cls(id=row_id, chosen=ids[:count], rejected=ids[count:], margin=margin)


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
        ids = np.concatenate([self.chosen, self.rejected]).astype(ID).tobytes()
        mask = np.concatenate([self.chosen_mask, self.rejected_mask]).tobytes()
        return np.array([len(self.chosen)], _SIZE).tobytes() + ids + mask

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> PairRow:
        """The row that `to_bytes` wrote."""
        count = int(np.frombuffer(data, _SIZE, 1)[0])
        tokens = (len(data) - _SIZE.itemsize) // (ID.itemsize + 1)
        ids = np.frombuffer(data, ID, tokens, _SIZE.itemsize).astype(np.int64)
        mask = np.frombuffer(data, np.bool_, tokens, _SIZE.itemsize + tokens * ID.itemsize)
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
        ids = np.concatenate([ids for ids, _ in self.sides]).astype(ID).tobytes()
        return sizes + ids + np.concatenate([mask for _, mask in self.sides]).tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> RankedRow:
        """The row that `to_bytes` wrote."""
        count = int(np.frombuffer(data, _SIZE, 1)[0])
        sizes = np.frombuffer(data, _SIZE, count, _SIZE.itemsize)
        tokens, begins = int(sizes.sum()), (1 + count) * _SIZE.itemsize
        ids = np.frombuffer(data, ID, tokens, begins).astype(np.int64)
        mask = np.frombuffer(data, np.bool_, tokens, begins + tokens * ID.itemsize)
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
        return np.array([self.label]).tobytes() + self.token_ids.astype(ID).tobytes() + self.mask.tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> LabelledRow:
        """The row that `to_bytes` wrote."""
        tokens = (len(data) - 1) // (ID.itemsize + 1)
        ids = np.frombuffer(data, ID, tokens, 1).astype(np.int64)
        mask = np.frombuffer(data, np.bool_, tokens, 1 + tokens * ID.itemsize)
        return cls(id=row_id, token_ids=ids, mask=mask, label=bool(data[0]))


R = TypeVar("R", SupervisedRow, PreferenceRow, PairRow, RankedRow, LabelledRow)
