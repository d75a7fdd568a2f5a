"""Rows that are already tokenized: `input_ids`, and a mask of the learned tokens."""

from __future__ import annotations

import numpy as np

from skyrl.chats.contents import short
from skyrl.chats.masks import Ids, Mask
from skyrl.data.sources import Row
from skyrl.errors import DataError

UNLEARNED = -100
"""The label of a token that is not learned, as in PyTorch's cross entropy."""

MASKS = ("loss_mask", "assistant_masks", "completion_mask", "attention_mask")
"""Mask columns of 0 and 1. A token is learned if every mask of its row is 1; padding has attention 0."""


def tokenized_row(row: Row, vocabulary: int) -> tuple[Ids, Mask]:
    """Tokens and mask of a row, without its padding. Raises `DataError` for inconsistent columns."""
    ids = _whole_numbers(row["input_ids"], "input_ids")
    if not len(ids):
        raise DataError("input_ids are empty")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise DataError(f"input_ids go from {ids.min()} to {ids.max()}, and the tokenizer has 0 to {vocabulary - 1}")
    learned = np.ones(len(ids), dtype=np.bool_)
    if row.get("labels") is not None:
        labels = _beside(ids, row["labels"], "labels")
        learned = labels != UNLEARNED
        if (labels[learned] != ids[learned]).any():
            raise DataError("labels are neither input_ids nor -100; they are not shifted by one, either")
    masks = {name: _zeros_and_ones(ids, row[name], name) for name in MASKS if row.get(name) is not None}
    for mask in masks.values():
        learned = learned & mask
    attended = masks.get("attention_mask", np.ones(len(ids), dtype=np.bool_))
    return ids[attended], learned[attended]


def _zeros_and_ones(ids: Ids, given: object, name: str) -> Mask:
    mask = _beside(ids, given, name)
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{name} has other numbers than 0 and 1")
    return mask.astype(np.bool_)


def _beside(ids: Ids, given: object, name: str) -> Ids:
    found = _whole_numbers(given, name)
    if found.shape != ids.shape:
        raise DataError(f"{len(ids)} input_ids have {len(found)} {name}")
    return found


def _whole_numbers(given: object, name: str) -> Ids:
    """The value as a flat array of whole numbers. Raises `DataError` for anything else: nothing is rounded."""
    try:
        found = np.asarray(given)
    except ValueError:  # lists of different lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or not (len(found) == 0 or found.dtype.kind in "iub"):
        raise DataError(f"{name} is {short(given)}, not a list of whole numbers")
    return found.astype(np.int64)
