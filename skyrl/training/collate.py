"""Collates groups of trajectories, or rows of supervised training, into one training batch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl.algorithms.topk_divergence import ABSENT
from skyrl.batch import TEACHER_IDS, TEACHER_LOGPROBS, RowTensors, TrainingBatch
from skyrl.chats.masks import Ids, Mask
from skyrl.data.tokenized_rows import LabelledRow, LikelyTokens, PairRow, PreferenceRow, RankedRow, SupervisedRow
from skyrl.errors import RunError
from skyrl.models.routers import joined_choices
from skyrl.trajectory import RowArray, TokenRow, Trajectory, TrajectoryGroup


def collate(groups: Sequence[TrajectoryGroup], version: int = 0, *, masks_zero_variance: bool = False) -> TrainingBatch:
    """One row for each `TokenRow` of each sample, in the order of the groups: prompt, response, padding on the right.
    `version` is that of the policy's weights.

    Raises `RunError` if every answer was cut off and none may be trained on. With `masks_zero_variance`
    (`algorithm.zero_variance_filter`), that is no error if the rewards of each group are equal.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rows_of_each = [trajectory.token_rows for trajectory in trajectories]
    rows = [row for token_rows in rows_of_each for row in token_rows]
    trajectory_of_row = np.repeat(np.arange(len(trajectories)), [len(token_rows) for token_rows in rows_of_each])
    group_of_row = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])[trajectory_of_row]
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    shape = (len(rows), max(lengths))
    input_ids = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.bool_)
    logprobs = np.zeros(shape, dtype=np.float32)
    rewards = np.zeros(shape, dtype=np.float32)
    engines = np.full(shape, -1, dtype=np.int64)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        prompt = len(row.prompt_ids)
        input_ids[index, :prompt] = _array(row.prompt_ids, "q")
        input_ids[index, prompt:length] = _array(row.response_ids, "q")
        loss_mask[index, prompt:length] = _array(row.loss_mask, "?")
        if len(row.rollout_logprobs):
            logprobs[index, prompt:length] = _array(row.rollout_logprobs, "f")
        if row.engines and all(weight_version == version for weight_version in row.weight_versions):
            engines[index, prompt:length] = _array(row.engines, "q")
        # A turn's reward goes to its last trained token; without one, to its last token; if the turn sampled nothing,
        # to the last token of the prompt.
        for turn in row.rewards:
            trained = (token for token in range(turn.token, -1, -1) if row.loss_mask[token])
            rewards[index][len(row.prompt_ids) + next(trained, turn.token)] += turn.reward
    reasons = {trajectory.stop_reason for trajectory in trajectories}
    filtered = masks_zero_variance and all(len(set(group.rewards)) == 1 for group in groups)
    if not loss_mask.any() and "stop" not in reasons and not filtered:
        limits = {"length": "generator.sampling_params.max_generate_length", "context": "generator.max_input_length"}
        raise RunError(
            "no answer of this batch is complete, and generator.apply_overlong_filtering leaves out incomplete ones: "
            f"raise {' and '.join(limit for reason, limit in limits.items() if reason in reasons)}"
        )
    return TrainingBatch(
        input_ids=torch.from_numpy(input_ids),
        lengths=torch.tensor(lengths),
        loss_mask=torch.from_numpy(loss_mask),
        rollout_logprobs=torch.from_numpy(logprobs) if any(len(row.rollout_logprobs) for row in rows) else None,
        rewards=torch.from_numpy(rewards),
        groups=torch.from_numpy(group_of_row),
        answer_lengths=torch.tensor([len(row.response_ids) for row in rows]),
        trajectory_lengths=torch.tensor([trajectory.length for trajectory in trajectories])[
            torch.from_numpy(trajectory_of_row)
        ],
        baselines=_baselines(groups, group_of_row),
        routed_experts=joined_choices([row.routed_experts for row in rows], shape[1]),
        engines=torch.from_numpy(engines) if (engines >= 0).any() else None,
        extras={name: _joined(name, rows) for name in dict.fromkeys(name for row in rows for name in row.extras)},
        **_steps(trajectories, trajectory_of_row),
    )


def row_sources(groups: Sequence[TrajectoryGroup]) -> tuple[str, ...]:
    """The data source of each row of `collate`."""
    return tuple(
        group.prompt.data_source for group in groups for trajectory in group.trajectories for _ in trajectory.token_rows
    )


def versions_behind(groups: Sequence[TrajectoryGroup], version: int, width: int) -> Tensor:
    """(B, `width`) int64: number of weight updates between the sampling of each token and `version`; 0 elsewhere. The
    rows are those of `collate`.
    """
    rows = [row for group in groups for trajectory in group.trajectories for row in trajectory.token_rows]
    behind = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        start = len(row.prompt_ids)
        behind[index, start : start + len(row.weight_versions)] = version - _array(row.weight_versions, "q")
    return torch.from_numpy(behind)


def _array(values: Sequence[float], code: str) -> NDArray[Any]:
    """The values as an array of the type that `struct` and numpy call `code`: `struct` reads tuples three times as fast
    as numpy, and numpy ten times as fast as torch.
    """
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), np.dtype(code))


def _joined(name: str, rows: Sequence[TokenRow]) -> RowTensors:
    """The arrays that rows carry under a name; a row without one carries none. Raises `RunError` if rows differ in the
    type or in the size of an entry.
    """
    carried = [_tensor(row.extras[name]) if name in row.extras else None for row in rows]
    nothing = next(item[:0] for item in carried if item is not None)
    try:
        return RowTensors.of([nothing if entry is None else entry for entry in carried])
    except ValueError as error:
        raise RunError(f"extras {name!r} of the samples do not fit into one batch: {error}") from error


def _tensor(array: RowArray) -> Tensor:
    dtype: torch.dtype = getattr(torch, array.dtype)
    flat = torch.frombuffer(bytearray(array.data), dtype=dtype) if array.data else torch.empty(0, dtype=dtype)
    return flat.view(array.shape)


def _steps(trajectories: Sequence[Trajectory], trajectory_of_row: NDArray[np.int64]) -> dict[str, Tensor]:
    """The trajectory of each row, and whether the row is its last; empty if every trajectory is a single row."""
    if not any(trajectory.earlier for trajectory in trajectories):
        return {}
    last = np.append(trajectory_of_row[1:] != trajectory_of_row[:-1], True)
    return {"trajectories": torch.from_numpy(trajectory_of_row), "last_step": torch.from_numpy(last)}


def _baselines(groups: Sequence[TrajectoryGroup], group_of_row: NDArray[np.int64]) -> Tensor | None:
    """The reward of each prompt's greedy answer, for each of its rows; None unless all have one."""
    known = [group.baseline for group in groups if group.baseline is not None]
    return torch.tensor(known)[torch.from_numpy(group_of_row)] if len(known) == len(groups) else None


def collate_supervised(rows: Sequence[SupervisedRow]) -> TrainingBatch:
    """One row for each supervised row, with its learned tokens selected, and token weights if they differ from that
    mask.
    """
    lengths = [row.length for row in rows]
    ids, weights = _padded([row.token_ids for row in rows]), _padded([row.weights for row in rows])
    batch = _batch(ids, weights > 0, lengths, list(range(len(rows))), None)
    taught = [row.teacher for row in rows if row.teacher is not None]
    if taught:
        batch = batch.carrying(**_likely_tokens(taught))
    return batch if torch.equal(weights, batch.loss_mask.float()) else batch.with_fields(token_weights=weights)


def _likely_tokens(rows: Sequence[LikelyTokens]) -> dict[str, RowTensors]:
    """The extras of rows that store what a teacher found likely; shorter lists are filled with absent tokens."""
    most = max(row.ids.shape[1] for row in rows)

    def filled(table: NDArray[Any], value: int) -> Tensor:
        return torch.from_numpy(np.pad(table, ((0, 0), (0, most - table.shape[1])), constant_values=value))

    return {
        TEACHER_IDS: RowTensors.of([filled(row.ids, ABSENT) for row in rows]),
        TEACHER_LOGPROBS: RowTensors.of([filled(row.logprobs, 0) for row in rows]),
    }


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
    return batch.with_fields(rewards=batch.loss_mask * margins[:, None]) if margins.any() else batch


def collate_answers(
    rows: Sequence[PairRow] | Sequence[RankedRow], answers: int = 2, *, share_prompts: bool = True
) -> TrainingBatch:
    """`answers` rows for each pair or ranked list, from the best answer to the worst, with the tokens of the answers
    selected; a shorter list is filled with rows of which none is. With `share_prompts`, the tokens before the answers
    that all begin with are marked as their prompt. Rows that carry log-probabilities of the reference fill
    `ref_logprobs`.
    """
    items = [[*row.sides, *[_filling(row)] * (answers - len(row.sides))] for row in rows]
    sides = [side for item in items for side in item]
    lengths = [len(ids) for ids, _ in sides]
    shared = [_common_prompt(row) if share_prompts else 0 for row in rows for _ in range(answers)]
    sizes = [length - prompt for length, prompt in zip(lengths, shared, strict=True)]
    groups = [item for item in range(len(rows)) for _ in range(answers)]
    mask = _padded([mask for _, mask in sides])
    batch = _batch(_padded([ids for ids, _ in sides]), mask, lengths, groups, sizes)
    known = [row.ref_logprobs for row in rows if row.ref_logprobs is not None]
    return batch.with_fields(ref_logprobs=batch.scatter(torch.from_numpy(np.concatenate(known)))) if known else batch


def _filling(row: PairRow | RankedRow) -> tuple[Ids, Mask]:
    """The prompt of a list and one more token, none of which is selected."""
    ids, mask = row.sides[0]
    end = int(mask.argmax()) + 1
    return ids[:end], np.zeros(end, dtype=np.bool_)


def collate_labelled(rows: Sequence[LabelledRow]) -> TrainingBatch:
    """One row for each answer, with its tokens selected, and `label`, 1 for a good one and 0 for a bad one. Rows that
    carry log-probabilities of the reference fill `ref_logprobs`.
    """
    lengths = [row.length for row in rows]
    ids, mask = _padded([row.token_ids for row in rows]), _padded([row.mask for row in rows])
    batch = _batch(ids, mask, lengths, list(range(len(rows))), None)
    labels = torch.tensor([float(row.label) for row in rows])
    batch = batch.carrying(label=RowTensors(values=labels, counts=torch.ones(len(rows), dtype=torch.long)))
    known = [row.ref_logprobs for row in rows if row.ref_logprobs is not None]
    return batch.with_fields(ref_logprobs=batch.scatter(torch.from_numpy(np.concatenate(known)))) if known else batch


def mismatched(batch: TrainingBatch, longest: int) -> TrainingBatch:
    """Each prompt of the batch with the answer of the row before it, the first with that of the last, cut at `longest`
    tokens: what KTO estimates the KL divergence on.
    """
    starts, lengths = batch.loss_mask.int().argmax(1).tolist(), batch.lengths.tolist()
    rows = []
    for row, start in enumerate(starts):
        other = row - 1
        parts = [(row, slice(0, start)), (other, slice(starts[other], lengths[other]))]
        rows.append([torch.cat([field[at][part] for at, part in parts])[:longest] for field in _token_fields(batch)])
    ids, mask = (_padded([row[index].numpy() for row in rows]) for index in range(2))
    return _batch(ids, mask, [len(row[0]) for row in rows], list(range(len(rows))), None)


def _token_fields(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    return batch.input_ids, batch.loss_mask


def _common_prompt(row: PairRow | RankedRow) -> int:
    """Number of tokens before any answer that all sequences begin with."""
    (first, _), *others = row.sides
    answer = min(int(mask.argmax()) for _, mask in row.sides)
    return min(answer, *(common_beginning(first, ids) for ids, _ in others))


def common_beginning(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Number of leading tokens that both sequences share, at most one less than the shorter has."""
    count = min(len(one), len(other)) - 1
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count


def _padded(rows: Sequence[NDArray[Any]]) -> Tensor:
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
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
