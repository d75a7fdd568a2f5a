from __future__ import annotations

import datetime
import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from skyrl.data.group_lines import as_object, group_of
from skyrl.errors import DataError, RunError
from skyrl.tracking.recording import BatchDump, Computed, Recording, SampledBatch, Update
from skyrl.trajectory import Failure, Prompt, TokenRow, Trajectory, TrajectoryGroup, TurnReward

GROUP = TrajectoryGroup(
    prompt=Prompt(
        id="0:3",
        messages=({"role": "user", "content": "a\u2028b \x85 ü"},),
        token_ids=(5, 6),
        env_class="gsm8k",
        extras={
            "$odd": {"deep": [1, (2.5, None)]},
            "blob": b"\x00\xff",
            "day": datetime.date(2026, 1, 2),
            "now": datetime.datetime(2026, 1, 2, 3, 4, 5),
            "price": Decimal("0.10"),
            "limit": float("inf"),
        },
    ),
    trajectories=(
        Trajectory(
            prompt_id="0:3",
            sample_index=0,
            prompt_ids=(5, 6),
            response_ids=(7, 8),
            loss_mask=(1, 0),
            rollout_logprobs=(-0.1 - 2**-55, float("-inf")),
            weight_versions=(2, 2),
            rewards=(TurnReward(token=1, reward=1 / 3),),
            stop_reason="length",
            metrics={"turns": 1.0},
            timings={"llm": 0.25},
            failures=(Failure(kind="raised", reason="no"),),
            skipped="the row has no answer",
            filled=True,
            earlier=(
                TokenRow(
                    prompt_ids=(5,),
                    response_ids=(6,),
                    loss_mask=(1,),
                    rollout_logprobs=(-0.5,),
                    weight_versions=(1,),
                    rewards=(TurnReward(token=-1, reward=0.5),),
                ),
            ),
        ),
    ),
    baseline=0.1 + 0.2,
)


def computed(step: int) -> Computed:
    return Computed(
        step=step,
        tensors={"rewards": torch.tensor([[0.0, 1 / 3]])},
        updates=(Update(learner="policy", metrics={"grad_norm": float("nan"), "policy_loss": 0.1}),),
        weights={"policy": {"w": "00ff"}},
    )


def recording(folder: Path, *, compress: bool = False, steps: int = 2) -> Recording:
    archive = Recording(folder / "recording", compress=compress)
    archive.begin({"total_steps": 9})
    for step in range(1, steps + 1):
        archive.write_sampled(step, SampledBatch(groups=(GROUP,), metrics={"generate/groups_dropped": 1.0}, epoch=1))
        archive.write_computed(computed(step))
    return archive


def test_a_group_comes_back_equal_in_everything() -> None:
    restored = group_of(json.loads(json.dumps(as_object(GROUP))))
    assert restored == GROUP
    assert restored.trajectories[0].timings == GROUP.trajectories[0].timings  # which equality leaves out
    assert type(restored.prompt.extras["$odd"]["deep"]) is list


def test_a_group_of_before_answers_were_kept_is_read() -> None:
    lines = json.loads(json.dumps(as_object(GROUP)))
    for trajectory in lines["trajectories"]:
        del trajectory["answer"]
    assert group_of(lines) == GROUP


@pytest.mark.parametrize("compress", [False, True])
def test_a_step_comes_back_as_it_was(compress: bool, tmp_path: Path) -> None:
    archive = recording(tmp_path, compress=compress)
    assert archive.steps() == [1, 2]
    assert archive.sampled(2) == SampledBatch(groups=(GROUP,), metrics={"generate/groups_dropped": 1.0}, epoch=1)
    restored = archive.computed(2)
    assert torch.equal(restored.tensors["rewards"], torch.tensor([[0.0, 1 / 3]]))
    assert restored.updates[0].metrics["policy_loss"] == 0.1
    assert restored.updates[0].metrics["grad_norm"] != restored.updates[0].metrics["grad_norm"]  # NaN
    assert restored.weights == {"policy": {"w": "00ff"}}


@pytest.mark.parametrize(
    "alias",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[:, :],
        lambda tensor: tensor[:2, 1:],
        lambda tensor: tensor[1:],
        lambda tensor: tensor.t().reshape(3, 4)[:, :4],
        lambda tensor: tensor[:1].expand(3, 4),
        lambda tensor: tensor.detach(),
    ],
    ids=["itself", "view", "block", "rows", "order", "repeated", "detached"],
)
def test_tensors_that_share_memory_are_stored_under_each_name(alias: Any, tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    tensors = {"rollout_logprobs": tensor, "old_logprobs": alias(tensor)}
    archive = recording(tmp_path, steps=0)
    archive.write_sampled(1, SampledBatch(groups=(GROUP,)))
    archive.write_computed(evolve(computed(1), tensors=tensors))
    BatchDump(tmp_path / "dumped").write_computed(evolve(computed(1), tensors=tensors))
    dumped = load_file(tmp_path / "dumped" / "global_step_1.safetensors")
    for stored in (archive.computed(1).tensors, dumped):
        assert stored.keys() == tensors.keys()
        assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def test_a_compressed_file_has_the_lines_of_a_plain_one(tmp_path: Path) -> None:
    recording(tmp_path / "plain")
    recording(tmp_path / "small", compress=True)
    plain = tmp_path / "plain" / "recording" / "step_000001.jsonl"
    small = tmp_path / "small" / "recording" / "step_000001.jsonl.gz"
    assert gzip.decompress(small.read_bytes()) == plain.read_bytes()


def test_later_steps_are_forgotten_before_they_happen_again(tmp_path: Path) -> None:
    archive = recording(tmp_path, steps=3)
    archive.forget_after(1)
    assert archive.steps() == [1]
    assert sorted(path.name for path in archive.folder.glob("step_*")) == [
        *("step_000001.json", "step_000001.jsonl", "step_000001.safetensors")
    ]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: lines[:1], "contains 0 of 1 groups: it is incomplete"),
        (lambda lines: [lines[0], lines[1][:40]], "line 2 is not JSON"),
        (lambda lines: [lines[0], lines[1].replace('"baseline"', '"base"')], "line 2 is not a group"),
        (lambda lines: [lines[0], lines[1].replace("[7, 8]", '["seven", 8]')], "line 2 is not a group"),
        (lambda lines: lines[1:], "does not begin with a valid header line"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(spoil: Any, message: str, tmp_path: Path) -> None:
    archive = recording(tmp_path)
    file = archive.folder / "step_000002.jsonl"
    file.write_text("\n".join(spoil(file.read_text(encoding="utf-8").split("\n")[:2])) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"step_000002.jsonl.*{message}"):
        archive.sampled(2)


def test_a_step_that_is_not_there_and_a_recording_that_is_none_are_told(tmp_path: Path) -> None:
    archive = recording(tmp_path)
    for read in (archive.sampled, archive.computed):
        with pytest.raises(DataError, match="step 3 is not in the recording .*the steps 1 to 2"):
            read(3)
    with pytest.raises(DataError, match=r"there is no recording in .*trainer\.recording"):
        Recording(tmp_path / "elsewhere").about()
    (archive.folder / "about.json").write_text('{"schema": 99}', encoding="utf-8")
    with pytest.raises(DataError, match="has format 99, but this version reads format 1"):
        archive.about()


def test_a_column_that_json_cannot_hold_is_told_with_the_way_out() -> None:
    odd = evolve(GROUP, prompt=evolve(GROUP.prompt, extras={"column": object()}))
    with pytest.raises(RunError, match=r"has a value of type object, which cannot be written.*leave the column out"):
        as_object(odd)
