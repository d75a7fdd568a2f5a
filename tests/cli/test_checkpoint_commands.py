"""`skyrl ckpt`, on checkpoints as a run leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner, Result

from skyrl.checkpoint.store import CheckpointStore
from skyrl.cli.main import cli
from skyrl.errors import ResumeError
from tests.checkpoint.faulty import checkpoint


def skyrl(*words: str) -> Result:
    return CliRunner().invoke(cli, ["ckpt", *words], standalone_mode=False)  # as the command itself calls it


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path)
    for step in (9, 10):
        store.save(checkpoint(step, reward=step / 10))
    return tmp_path


def test_list_shows_every_step_with_its_size_and_what_is_wrong(folder: Path) -> None:
    (folder / "global_step_9" / "state.json").unlink()
    lines = skyrl("list", str(folder)).output.splitlines()
    assert lines[0] == f"{folder}: 2 checkpoints"
    assert lines[1].split(maxsplit=1) == ["9", f"{folder}/global_step_9/state.json is missing"]
    assert lines[2].split() == ["10", "471", "bytes"]


def test_verify_names_the_damaged_file_and_exits_with_1(folder: Path) -> None:
    assert skyrl("verify", str(folder)).exit_code == 0
    path = folder / "global_step_10" / "policy" / "rank_0_of_1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    result = skyrl("verify", str(folder))
    assert result.exit_code == 1
    assert [line.strip() for line in result.output.splitlines()] == [
        "9  good",
        "10  damaged",
        f"{path} is damaged: its {path.stat().st_size} bytes do not match the recorded digest",
    ]
    assert skyrl("verify", str(folder / "global_step_9")).exit_code == 0


def test_show_prints_the_newest_checkpoint(folder: Path) -> None:
    output = skyrl("show", str(folder)).output
    assert "global_step_10" in output
    assert "policy       2 tensors, 15 weights" in output
    assert "trainer.version = 10" in output
    assert "reward = 1" in output


def test_show_counts_long_tables(tmp_path: Path) -> None:
    saved = evolve(checkpoint(1), state={"rollouts": {"parts": {str(number): "ab" for number in range(11)}}})
    CheckpointStore(tmp_path).save(saved)
    assert "    rollouts.parts = (11 values)" in skyrl("show", str(tmp_path)).output.splitlines()


def test_show_counts_what_alarms_have_seen(tmp_path: Path) -> None:
    alarms = {
        name: {"condition": {"metric": "reward", "above": 1.0}, "seen": {"count": 3, "first": []}} for name in "abc"
    }
    saved = evolve(checkpoint(1), state={"trainer": {"version": 1, "alarms": {"alarms": alarms, "stopped_by": ""}}})
    CheckpointStore(tmp_path).save(saved)
    lines = skyrl("show", str(tmp_path)).output.splitlines()
    state = lines[lines.index("  state") + 1 : lines.index("  metrics")]
    assert state == ["    trainer.version = 1", "    trainer.alarms = (13 values)"]


def test_the_folder_of_checkpoints_may_lie_anywhere(folder: Path) -> None:
    config = {"kind": "rl", "trainer": {"run_path": "/elsewhere", "ckpt_path": "/elsewhere/checkpoints"}}
    (folder / "config.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    assert skyrl("list", str(folder)).output.startswith(f"{folder}: 2 checkpoints")


def test_diff_shows_state_and_the_tensors_that_differ(folder: Path) -> None:
    output = skyrl("diff", str(folder / "global_step_9"), str(folder / "global_step_10")).output
    assert "configuration: 0 values differ" in output
    assert "  trainer.version: 9 -> 10" in output
    assert "policy: 2 of 2 tensors differ" in output
    assert "  model.weight: differs by at most 1" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "nowhere"], "there is no folder nowhere"),
        (["show", "."], "contains no checkpoint"),
        (["verify", "."], "contains no checkpoint"),
        (["list", "global_step_3"], "there is no checkpoint folder global_step_3"),
        (["diff", ".", "."], "is not a checkpoint"),
        (["show", "global_step_3"], "there is no checkpoint folder"),
    ],
)
def test_a_missing_checkpoint_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = skyrl(*words)
    assert isinstance(result.exception, ResumeError)
    assert message in str(result.exception)
