"""What rows carry besides tokens: it stays with its row from the sample to the objective."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.batch import RowTensors, TrainingBatch
from skyrl.data.group_lines import as_object, group_of
from skyrl.errors import RunError
from skyrl.learners.budget import TokenBudget, micro_batches
from skyrl.learners.forward import ForwardOptions
from skyrl.learners.workers.group import deal
from skyrl.training.collate import collate
from skyrl.trajectory import RowArray, TrajectoryGroup
from tests.learners.rows import batch
from tests.training.test_collate import group, trajectory

COUNTS = (2, 0, 1, 3, 0, 1)
"""Images of each row, of 2 x 3 numbers."""


def images(rows: TrainingBatch) -> list[Tensor]:
    return list(rows.extras["images"].rows())


def marked() -> TrainingBatch:
    """Six rows whose images are filled with the first token of their row."""
    rows = batch(6)
    return rows.carrying(
        images=RowTensors.of([torch.full((n, 2, 3), float(rows.input_ids[row, 0])) for row, n in enumerate(COUNTS)])
    )


def assert_with_their_rows(rows: TrainingBatch) -> None:
    """Each row has the images that it began with."""
    full_batch = marked()
    counts = {int(ids[0]): n for ids, n in zip(full_batch.input_ids, COUNTS, strict=True)}
    assert len(counts) == 6
    for ids, own in zip(rows.input_ids, images(rows), strict=True):
        assert own.shape == (counts[int(ids[0])], 2, 3)
        assert bool((own == ids[0]).all())


WAYS: dict[str, Any] = {
    "some rows in another order": lambda rows: [rows.select(torch.tensor([4, 0, 3]))],
    "cut": lambda rows: list(rows.split(4)),
    "cut by answers": lambda rows: list(rows.split_by_answers(4)),
    "dealt to ranks": lambda rows: deal(rows, 2),
    "dealt where the last row is repeated": lambda rows: deal(rows, 4),
    "cut by a budget": lambda rows: [part for _, part in micro_batches(TokenBudget(tokens=20).plan([rows])[0], 2)],
    "on a device": lambda rows: [rows.to("cpu")],
    "with more fields": lambda rows: [rows.with_fields(values=torch.zeros(rows.input_ids.shape)).with_selected()],
    "sent": lambda rows: [pickle.loads(pickle.dumps(rows))],
}


@pytest.mark.parametrize("operation", WAYS)
def test_extras_stay_with_their_rows(operation: str) -> None:
    parts = WAYS[operation](marked())
    assert sum(len(part) for part in parts) in (3, 6, 8)
    for part in parts:
        assert_with_their_rows(part)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_extras_stay_with_their_rows_in_every_layout(pack: bool, share_prompts: bool) -> None:
    options = ForwardOptions(
        pack=pack, segmented=True, lengths_given=False, share_prompts=share_prompts, plain_head=True
    )
    rows = marked().with_fields(answer_lengths=torch.tensor([2] * 6))
    assert_with_their_rows(options.prepare(rows).to(torch.device("cpu")).rows)


def test_entries_of_tokens_are_padded_as_tokens_are() -> None:
    carried = RowTensors.of([torch.tensor([[1.0, 2.0]]), torch.empty(0, 2), torch.tensor([[3.0, 4.0], [5.0, 6.0]])])
    assert carried.padded(3).tolist() == [
        [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]],
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        [[3.0, 4.0], [5.0, 6.0], [0.0, 0.0]],
    ]
    with pytest.raises(ValueError, match="a row carries 2 entries, and 1 are expected at most"):
        carried.padded(1)
    with pytest.raises(ValueError, match="extras 'teacher' are those of 3 rows, the batch has 6"):
        batch(6).carrying(teacher=carried)


PIXELS = np.arange(12, dtype=np.float32).reshape(2, 2, 3)


def sampled(*carried: dict[str, RowArray]) -> TrajectoryGroup:
    """A group whose samples carry these."""
    rows = [evolve(trajectory((5,), (7,), 1.0, number), extras=extras) for number, extras in enumerate(carried)]
    return group(*rows)


def test_samples_carry_arrays_into_the_batch_and_a_sample_without_any_carries_none() -> None:
    rows = collate([sampled({"images": RowArray.of(PIXELS)}, {}), sampled({"images": RowArray.of(PIXELS[:1])})])
    assert rows.extras["images"].counts.tolist() == [2, 0, 1]
    assert torch.equal(rows.extras["images"].values, torch.from_numpy(np.concatenate([PIXELS, PIXELS[:1]])))
    assert collate([sampled({}, {})]).extras == {}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_samples_of_a_checkpoint_or_recording_carry_the_same_numbers(dtype: str) -> None:
    values = np.array([[1, 0], [0, 1], [1, 1]]).astype(dtype)[::-1]  # a view with strides
    kept = sampled({"some": RowArray.of(values), "none": RowArray.of(values[:0])})
    restored = group_of(json.loads(json.dumps(as_object(kept))))
    assert restored == kept
    extras = collate([restored]).extras
    assert torch.equal(extras["some"].values, torch.from_numpy(values.copy()))
    assert (extras["none"].values.shape, extras["none"].values.dtype) == ((0, 2), getattr(torch, dtype))


def test_lines_of_samples_that_carry_nothing_are_as_they_were() -> None:
    assert "extras" not in as_object(sampled({}))["trajectories"][0]


REFUSED: dict[str, Any] = {
    "objects": np.array([{}, None]),
    "texts": np.array(["a", "b"]),
    "complex numbers": np.array([1j]),
    "big-endian numbers": np.array([1.0], dtype=">f4"),
    "no dimension": np.array(1.0, dtype=np.float32),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_arrays_that_a_row_cannot_carry_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="a row cannot carry"):
        RowArray.of(REFUSED[kind])


def test_bytes_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a row cannot carry 8 bytes as an array of float32 \(3,\)"):
        RowArray(dtype="float32", shape=(3,), data=bytes(8))


@pytest.mark.parametrize("other", [PIXELS.astype(np.float64), PIXELS[:, :1], PIXELS[0], PIXELS.astype(np.int32)])
def test_samples_that_carry_different_kinds_of_arrays_are_refused(other: Any) -> None:
    with pytest.raises(RunError, match="extras 'images' of the samples do not fit into one batch: rows of one batch"):
        collate([sampled({"images": RowArray.of(PIXELS)}, {"images": RowArray.of(other)})])
