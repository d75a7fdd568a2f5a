"""Samples that are kept for people: lines and token columns, written on a thread of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl.errors import DataError
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tracking.recording import Computed
from skyrl.tracking.sample_files import BackgroundWriter, SampleFiles, kept_groups
from skyrl.tracking.token_file import TokenFiles
from skyrl.trajectory import Prompt, TokenRow, Trajectory, TrajectoryGroup, TurnReward
from tests.fresh_process import run_program


def decode(ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in ids)


def row(tokens: Sequence[int]) -> dict[str, Any]:
    """A prompt of two tokens, and an answer of these under the weights of version 7."""
    return {
        "prompt_ids": (1, 2),
        "response_ids": tuple(tokens),
        "loss_mask": (1,) * len(tokens),
        "rollout_logprobs": tuple(-0.5 * token for token in tokens),
        "weight_versions": (7,) * len(tokens),
        "rewards": (TurnReward(token=len(tokens) - 1, reward=1.0),),
    }


def trajectory(prompt: str, sample: int, tokens: Sequence[int], **changes: Any) -> Trajectory:
    return Trajectory(prompt_id=prompt, sample_index=sample, stop_reason="stop", **row(tokens), **changes)


def group(prompt: str, *trajectories: Trajectory) -> TrajectoryGroup:
    of = Prompt(id=prompt, messages=({"role": "user", "content": "?"},), token_ids=(1, 2), env_class="e")
    return TrajectoryGroup(prompt=of, trajectories=trajectories)


GROUPS = (
    group("0:0", trajectory("0:0", 0, (3,)), trajectory("0:0", 1, (4, 5))),
    group("0:1", trajectory("0:1", 0, (6,), earlier=(TokenRow(**row((8, 9))),)), trajectory("0:1", 1, ())),
)
"""Five rows of a batch: two of the first group; of the second one with an earlier turn, and one without a token."""


def files(folder: Path) -> SampleFiles:
    return SampleFiles(JsonLines(folder / "trajectories.jsonl"), TokenFiles(folder / "tokens"))


def computed(step: int) -> Computed:
    """Advantage of each token: its row, and a tenth for its place."""
    advantages = torch.arange(5.0)[:, None] + torch.arange(4.0) / 10
    return Computed(step=step, tensors={"advantages": advantages}, updates=(), weights={})


def test_each_token_of_a_step_comes_back_with_its_numbers(tmp_path: Path) -> None:
    kept = files(tmp_path)
    sink = kept.sink(decode, -1)
    sink.keep(3, GROUPS)
    sink.write_computed(computed(3))
    kept.close()
    table = TokenFiles(tmp_path / "tokens").read(3, 1)
    assert table is not None
    columns = dict(table.columns)
    assert columns.pop("advantages") == [pytest.approx([2.2, 2.3]), pytest.approx([3.2]), []]
    assert columns == {
        "prompt_id": ["0:1"] * 3,
        "sample": [0, 0, 1],
        "turn": [0, 1, 0],
        "prompt_ids": [[1, 2]] * 3,
        "response_ids": [[8, 9], [6], []],
        "loss_mask": [[True, True], [True], []],
        "weight_versions": [[7, 7], [7], []],
        "rollout_logprobs": [[-4.0, -4.5], [-3.0], []],
    }
    assert table.pieces[9] == "<9>"


def test_a_step_that_was_given_up_has_lines_and_tokens_without_advantages(tmp_path: Path) -> None:
    kept = files(tmp_path)
    sink = kept.sink(decode, -1)
    sink.keep(1, GROUPS)
    sink.keep(2, GROUPS)
    sink.write_uncomputed()
    kept.close()
    for step in (1, 2):
        table = kept.tokens.read(step, 0)
        assert (
            table is not None and table.columns["response_ids"] == [[3], [4, 5]] and "advantages" not in table.columns
        )
    assert [(line["step"], line["group"], line["sample"]) for line in kept.lines.read()] == [
        (step, *which) for step in (1, 2) for which in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]


def test_of_a_step_so_many_samples_are_kept_as_are_wanted_in_lines_and_tokens(tmp_path: Path) -> None:
    kept = files(tmp_path)
    sink = kept.sink(decode, 3)
    sink.keep(1, GROUPS)
    sink.write_computed(computed(1))
    kept.close()
    lines = [(line["prompt_id"], line["sample"]) for line in kept.lines.read()]
    tables = [table for number in (0, 1) if (table := kept.tokens.read(1, number))]
    rows = [pair for table in tables for pair in zip(table.columns["prompt_id"], table.columns["sample"], strict=True)]
    assert len(lines) == 3 and set(lines) == set(rows)


def test_the_groups_that_are_kept_are_not_those_that_were_done_first() -> None:
    many = [group(str(n), trajectory(str(n), 0, (3,))) for n in range(100)]
    drawn = [int(selected.group.prompt.id) for step in range(20) for selected in kept_groups(step, many, 5)]
    assert len(drawn) == 100 and max(drawn) > 80 and kept_groups(4, many, 5) == kept_groups(4, many, 5)


def test_what_is_written_later_does_not_hold_up_who_submits_it(tmp_path: Path) -> None:
    gate, kept = threading.Event(), files(tmp_path)
    sink = kept.sink(lambda ids: decode(ids) if gate.wait(60) else "", -1)
    sink.keep(1, GROUPS)
    sink.write_computed(computed(1))
    assert list(kept.lines.read()) == []
    gate.set()
    kept.close()
    assert len(list(kept.lines.read())) == 4


async def test_after_a_failure_nothing_more_is_written_and_each_call_raises_it() -> None:
    writer, calls = BackgroundWriter(), []

    def full() -> None:
        raise OSError(28, "No space left on device")

    gate = threading.Event()
    writer.submit(lambda: calls.append("before") if gate.wait(60) else None)
    writer.submit(full)
    writer.submit(lambda: calls.append("after"))
    gate.set()
    with pytest.raises(OSError, match="No space left"):
        await writer.finished()
    with pytest.raises(OSError, match="No space left"):
        writer.submit(lambda: calls.append("later"))
    writer.close()
    assert calls == ["before"]


def test_tokens_of_later_steps_and_half_written_ones_are_forgotten(tmp_path: Path) -> None:
    kept = files(tmp_path)
    sink = kept.sink(decode, -1)
    for step in (1, 2, 3):
        sink.keep(step, GROUPS)
        sink.write_computed(computed(step))
    kept.forget_after(3)
    (tmp_path / "tokens" / ".step_000001.arrow.new").write_bytes(b"ARR")
    kept.forget_after(1)
    kept.close()
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["step_000001.arrow"]
    assert {line["step"] for line in kept.lines.read()} == {1}


@pytest.mark.parametrize("lost", range(4))
def test_a_step_that_has_lost_one_of_its_lines_is_found(tmp_path: Path, lost: int) -> None:
    kept = files(tmp_path)
    sink = kept.sink(decode, -1)
    for step in (1, 2, 3):
        sink.keep(step, GROUPS)
        sink.write_computed(computed(step))
    assert kept.forget_after(3) == []
    lines = (tmp_path / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    index = 4 + lost
    (tmp_path / "trajectories.jsonl").write_bytes(b"".join([*lines[:index], *lines[index + 1 :]]))
    assert kept.forget_after(3) == [2]
    kept.close()


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0 and no more", json.dumps([1]).encode()])
def test_a_damaged_file_of_tokens_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step_000001.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"step_000001\.arrow cannot be read"):
        TokenFiles(tmp_path).read(1, 0)


def test_a_step_without_a_file_has_no_tokens(tmp_path: Path) -> None:
    assert TokenFiles(tmp_path).read(1, 0) is None


def test_the_numbers_are_kept_in_single_precision(tmp_path: Path) -> None:
    kept = files(tmp_path)
    sink = kept.sink(decode, -1)
    sink.keep(1, [group("0:0", trajectory("0:0", 0, (3,)))])
    sink.write_computed(Computed(step=1, tensors={"advantages": torch.full((1, 3), 0.1)}, updates=(), weights={}))
    kept.close()
    table = kept.tokens.read(1, 0)
    assert table is not None and table.columns["advantages"] == [[float(np.float32(0.1))]]


def test_names_of_prompts_are_kept_in_any_script(tmp_path: Path) -> None:
    kept = files(tmp_path)
    sink = kept.sink(decode, -1)
    sink.keep(1, [group("größe:日本", trajectory("größe:日本", 0, [8, 9])), GROUPS[0]])
    sink.write_uncomputed()
    kept.close()
    table = kept.tokens.read(1, 0)
    assert table is not None
    assert table.columns["prompt_id"] == ["größe:日本"]


@pytest.mark.long
def test_tokens_are_written_without_pandas(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.tracking.test_sample_files import GROUPS, decode, files\n"
        "kept = files(Path(sys.argv[1])); sink = kept.sink(decode, -1)\n"
        "sink.keep(1, GROUPS); sink.write_uncomputed(); kept.close()\n"
        "print(kept.tokens.read(1, 0) is not None, 'pandas' in sys.modules)"
    )
    ran = run_program(program, tmp_path)
    assert ran.stdout.split() == ["True", "False"]
