"""Rows of supervised training as tokens, in memory and as bytes of a file."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from attrs import frozen

from skyrl.chats.masks import Ids, Mask

_ID = np.dtype("<i4")


@frozen(kw_only=True, eq=False)
class SupervisedRow:
    """One sequence, and which of its tokens are learned."""

    id: str
    token_ids: Ids
    loss_mask: Mask

    @property
    def length(self) -> int:
        """Length of the row in tokens."""
        return len(self.token_ids)

    def to_bytes(self) -> bytes:
        """Everything that is learned from: the tokens, then a byte of mask for each."""
        return self.token_ids.astype(_ID).tobytes() + self.loss_mask.tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> SupervisedRow:
        """The row that `to_bytes` wrote."""
        count = len(data) // (_ID.itemsize + 1)
        ids = np.frombuffer(data, _ID, count).astype(np.int64)
        return cls(id=row_id, token_ids=ids, loss_mask=np.frombuffer(data, np.bool_, offset=count * _ID.itemsize))


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
        """Everything that is learned from: the margin, the length of the better sequence, and both."""
        head = np.array([self.margin], "<f8").tobytes() + np.array([len(self.chosen)], "<i8").tobytes()
        return head + self.chosen.astype(_ID).tobytes() + self.rejected.astype(_ID).tobytes()

    @classmethod
    def of_bytes(cls, row_id: str, data: bytes) -> PreferenceRow:
        """The row that `to_bytes` wrote."""
        margin, count = float(np.frombuffer(data, "<f8", 1)[0]), int(np.frombuffer(data, "<i8", 1, 8)[0])
        ids = np.frombuffer(data, _ID, offset=16).astype(np.int64)
        return cls(id=row_id, chosen=ids[:count], rejected=ids[count:], margin=margin)


R = TypeVar("R", SupervisedRow, PreferenceRow)
