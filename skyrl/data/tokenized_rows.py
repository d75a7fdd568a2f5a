"""Rows of supervised training as tokens, in memory and as bytes of a file."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from skyrl.chats.masks import Ids, Mask, Weights
from skyrl.data.answer_pairs import LabelledRow, PairRow, RankedRow

ID = np.dtype("<i4")
"""Type of token ids in bytes of rows."""

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
        head = np.array([self.margin], "<f8").tobytes() + np.array([len(self.chosen)], "<i8").tobytes()
        return head + self.chosen.astype(ID).tobytes() + self.rejected.astype(ID).tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> PreferenceRow:
        """The row that `to_bytes` wrote."""
        margin, count = float(np.frombuffer(data, "<f8", 1)[0]), int(np.frombuffer(data, "<i8", 1, 8)[0])
        ids = np.frombuffer(data, ID, offset=16).astype(np.int64)
        return cls(id=row_id, chosen=ids[:count], rejected=ids[count:], margin=margin)


R = TypeVar("R", SupervisedRow, PreferenceRow, PairRow, RankedRow, LabelledRow)
