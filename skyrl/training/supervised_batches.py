"""Rows of supervised training as batches. They were not sampled and have no rewards, so those columns are empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.data.tokenized_rows import PreferenceRow, SupervisedRow


def collate_supervised(rows: Sequence[SupervisedRow]) -> TrainingBatch:
    """One row for each supervised row, with its learned tokens selected, and token weights if they differ from that
    mask.
    """
    lengths = [row.length for row in rows]
    ids, weights = _padded([row.token_ids for row in rows]), _padded([row.weights for row in rows])
    batch = _batch(ids, weights > 0, lengths, list(range(len(rows))), None)
    return batch if torch.equal(weights, batch.loss_mask.float()) else batch.given(token_weights=weights)


def collate_pairs(rows: Sequence[PreferenceRow], *, share_prompts: bool = True) -> TrainingBatch:
    """Two rows for each pair, chosen and rejected. Each gets one more token, which is selected: its value scores the
    chat before it. With `share_prompts`, the tokens that both begin with are marked as their prompt. The margin of a
    pair is the reward of the selected token of its chosen row.
    """
    sequences = [np.append(ids, 0) for row in rows for ids in (row.chosen, row.rejected)]
    lengths = [len(sequence) for sequence in sequences]
    mask = [np.arange(length) == length - 1 for length in lengths]
    shared = [common_beginning(row.chosen, row.rejected) if share_prompts else 0 for row in rows for _ in range(2)]
    answers = [length - prompt for length, prompt in zip(lengths, shared, strict=True)]
    groups = [pair for pair in range(len(rows)) for _ in range(2)]
    batch = _batch(_padded(sequences), _padded(mask), lengths, groups, answers)
    margins = torch.tensor([margin for row in rows for margin in (row.margin, 0.0)])
    return batch.given(rewards=batch.loss_mask * margins[:, None]) if margins.any() else batch


def common_beginning(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Number of leading tokens that both sequences share, at most one less than the shorter has."""
    count = min(len(one), len(other)) - 1
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count


def _padded(rows: Sequence[NDArray[Any]]) -> Tensor:
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=rows[0].dtype)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return torch.from_numpy(padded)


def _batch(
    ids: Tensor, mask: Tensor, lengths: Sequence[int], groups: Sequence[int], answers: Sequence[int] | None
) -> TrainingBatch:
    nothing = torch.zeros(()).expand(ids.shape)
    return TrainingBatch(
        input_ids=ids,
        lengths=torch.tensor(lengths),
        loss_mask=mask,
        rollout_logprobs=nothing,
        rewards=nothing,
        groups=torch.tensor(groups),
        answer_lengths=None if answers is None else torch.tensor(answers),
    )
