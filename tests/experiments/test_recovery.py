"""Where runs begin, go on and begin again; whole runs of a nano model, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.checkpoint.store import CheckpointStore
from skyrl.cli.main import main
from skyrl.config import compose
from skyrl.errors import ResumeError, RunError
from skyrl.experiments import experiment
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs import recovery
from skyrl.runs.resume import beginning
from skyrl.runs.run_folder import RunFolder
from skyrl.storage.disk import Disk
from skyrl.tree import fingerprint
from tests.long_cases import long_except
from tests.nano_run import config, metrics, overrides, train
from tests.supervised_run import toml_file

pytestmark = pytest.mark.xdist_group("recovery")

SHORT: dict[str, Any] = {
    "trainer__deterministic": True,
    "trainer__max_training_steps": 4,
    "trainer__ckpt_interval": 1,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}


@pytest.fixture(scope="module")
def uninterrupted(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    train(nano, folder, **SHORT)
    return folder


def digests(folder: Path, step: int = 4) -> dict[str, str]:
    """Of the tensors of a checkpoint."""
    files = CheckpointStore(folder / "checkpoints").manifest(step).files
    return {file.name: file.digest for file in files if file.name.endswith(".safetensors")}


def assert_ended_alike(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    assert digests(one) == digests(other)


def stopped_at_2(nano: Path, folder: Path) -> Path:
    train(nano, folder, **SHORT | {"trainer__max_training_steps": 2})
    return folder


@pytest.mark.long
def test_a_damaged_checkpoint_is_an_error_that_names_its_file_and_the_way_out(nano: Path, tmp_path: Path) -> None:
    stopped_at_2(nano, tmp_path)
    path = tmp_path / "checkpoints" / "global_step_2" / "policy" / "rank_0_of_1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ResumeError, match=r"rank_0_of_1.safetensors is damaged.*trainer.recover_mode=auto"):
        train(nano, tmp_path, **SHORT)


@pytest.mark.long
def test_auto_goes_on_from_the_checkpoint_before_it_and_says_so_in_one_line(
    nano: Path, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_at_2(nano, tmp_path)
    (tmp_path / "checkpoints" / "global_step_2" / "state.json").unlink()
    capsys.readouterr()
    train(nano, tmp_path, **SHORT, trainer__recover_mode="auto")
    [message] = [line for line in capsys.readouterr().err.splitlines() if "falling back" in line]
    assert f"{tmp_path}/checkpoints/global_step_2/state.json is missing" in message
    assert_ended_alike(tmp_path, uninterrupted)


def test_where_there_has_to_be_a_checkpoint_none_is_an_error(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"recover_mode = resume, but .* contains no checkpoint"):
        train(nano, tmp_path, **SHORT, trainer__recover_mode="resume")
    assert not (tmp_path / "run" / "config.json").exists()


class FailsOnce(BasePPOExp):
    """Its first session fails in the third step."""

    failed = False

    def _record_samples(self, step: int, groups: Any) -> None:
        if step == 3 and not type(self).failed:
            type(self).failed = True
            raise RunError("a rank is gone")
        super()._record_samples(step, groups)


def run_failing(nano: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    """The exit code of `skyrl run` with an experiment that fails once, and no pause before another attempt."""
    FailsOnce.failed = False
    monkeypatch.setattr(recovery, "PAUSE", 0.0)
    monkeypatch.setattr(experiment, "experiment_class", lambda run: FailsOnce)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with pytest.raises(SystemExit) as end:
        main(["run", toml_file(folder / "run.toml", overrides(nano, folder, **SHORT, **changes))])
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.long
@pytest.mark.parametrize("mode", long_except(["auto", "fault"], "auto"))
def test_a_run_that_fails_begins_again_and_ends_like_one_that_did_not(
    nano: Path,
    tmp_path: Path,
    uninterrupted: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_failing(nano, tmp_path, monkeypatch, trainer__recover_mode=mode, trainer__recover_retries=1) == 0
    assert "The run failed: a rank is gone\nIt restarts in 0 s (retry 1 of 1)" in capsys.readouterr().err
    assert_ended_alike(tmp_path, uninterrupted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", [{"trainer__recover_mode": "auto", "trainer__recover_retries": 0}, {}])
def test_a_run_that_may_not_begin_again_does_not(
    nano: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_failing(nano, tmp_path, monkeypatch, **changes) == RunError.exit_code
    assert capsys.readouterr().err.endswith("a rank is gone\n")
    assert [row["step"] for row in metrics(tmp_path)][-1] == 2
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1, 2], "what was being written was finished"


@pytest.mark.parametrize(
    ("recover", "resume", "first", "then"),
    [
        (None, "latest", "newest", "newest good"),
        (None, "none", "fresh", "newest good"),
        (None, None, "fresh", "newest good"),
        (None, "from_path", "named", "named"),
        ("disabled", "latest", "fresh", "newest good"),
        ("auto", "latest", "newest good", "newest good"),
        ("fault", "latest", "fresh", "newest good"),
        ("resume", "latest", "must", "newest good"),
    ],
)
def test_where_a_run_begins_first_and_after_a_failure(
    nano: Path, tmp_path: Path, recover: str | None, resume: str | None, first: str, then: str
) -> None:
    path = {"trainer__resume_path": "global_step_1"} if resume == "from_path" else {}
    run = config(nano, tmp_path, trainer__recover_mode=recover, trainer__resume_mode=resume, **path)
    assert (beginning(run, restarted=False), beginning(run, restarted=True)) == (first, then)


@pytest.mark.long
def test_a_changed_number_is_refused_or_said_and_an_identity_is_always_refused(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_at_2(nano, tmp_path)
    changed = {**SHORT, "trainer__policy__optimizer_config__lr": 0.5, "trainer__ckpt_interval": 2}
    with pytest.raises(ResumeError, match=r"optimizer_config.lr: .* 0.5 here\n.*trainer.resume_with_changes=true"):
        train(nano, tmp_path, **changed)
    with pytest.raises(ResumeError, match="trainer.seed: 42 there, 7 here"):
        train(nano, tmp_path, **changed, trainer__seed=7, trainer__resume_with_changes=True)
    capsys.readouterr()
    train(nano, tmp_path, **changed, trainer__resume_with_changes=True)
    stderr = capsys.readouterr().err
    assert "Continuing after step 2, from a checkpoint, with:\n" in stderr
    assert "optimizer_config.lr: " in stderr
    assert "  trainer.ckpt_interval: 1 there, 2 here" in stderr
    assert metrics(tmp_path)[-1]["policy/policy_lr"] == pytest.approx(0.5)
    first, second = RunFolder(tmp_path / "run").sessions.read()
    assert (first["step"], second["step"], second["before"]["step"]) == (0, 2, 2)
    assert second["changes"]["trainer.ckpt_interval"] == ["1", "2"]


@pytest.mark.parametrize(("state", "ended"), [("stopped", "stopped"), ("running", "gone")])
def test_a_start_is_recorded_with_the_end_of_the_session_before(state: str, ended: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.record_start(0, {})
    (tmp_path / "progress.json").write_text(json.dumps({"state": state, "process": "1:1", "host": "another"}))
    for step in (0, 1, 2):
        folder.metrics.append({"step": step})
    folder.record_start(1, {"trainer.policy.optimizer_config.lr": (0.1, 0.2)})
    first, second = folder.sessions.read()
    assert "before" not in first
    assert (second["step"], second["before"]) == (1, {"state": ended, "step": 2})
    assert second["changes"] == {"trainer.policy.optimizer_config.lr": ["0.1", "0.2"]}


@pytest.mark.long
def test_a_run_that_waits_for_its_checkpoints_saves_the_same(nano: Path, tmp_path: Path, uninterrupted: Path) -> None:
    train(nano, tmp_path, **SHORT, trainer__async_ckpt_save=False)
    assert_ended_alike(tmp_path, uninterrupted)
    for step in (1, 2, 3, 4):
        assert digests(tmp_path, step) == digests(uninterrupted, step)


@pytest.mark.parametrize("waits", long_except([True, False], False))
def test_a_full_disk_ends_the_run_with_what_is_needed_and_leaves_the_checkpoint_before(
    nano: Path, tmp_path: Path, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = iter([10**12, 10**12, 10**5])
    monkeypatch.setattr(Disk, "room", lambda self: next(room, 10**5))
    with pytest.raises(RunError, match=r"global_step_\d cannot be written: .*; it needs .* kB, and 100.0 kB are free"):
        train(nano, tmp_path, **SHORT, trainer__async_ckpt_save=not waits)
    store = CheckpointStore(tmp_path / "checkpoints")
    good = store.steps()
    assert good
    assert all(store.verify(step) == [] for step in good)


@pytest.mark.long
def test_a_run_goes_on_from_an_object_store(nano: Path, tmp_path: Path, uninterrupted: Path) -> None:
    object_store = {"trainer__ckpt_path": f"memory://{tmp_path}"}
    train(nano, tmp_path, **SHORT | object_store | {"trainer__max_training_steps": 2})
    train(nano, tmp_path, **SHORT | object_store)
    assert metrics(tmp_path) == metrics(uninterrupted)
    assert CheckpointStore(f"memory://{tmp_path}").steps() == [1, 2, 3, 4]


@pytest.mark.long
def test_a_checkpoint_knows_what_the_run_has_seen(uninterrupted: Path) -> None:
    state = json.loads((uninterrupted / "checkpoints" / "global_step_4" / "state.json").read_text(encoding="utf-8"))
    row = metrics(uninterrupted)[-1]
    assert state["trainer"]["samples_seen"] == row["trainer/samples_seen"] == 4 * 4 * 3
    assert state["trainer"]["tokens_seen"] == sum(
        record.get("generate/num_tokens", 0) for record in metrics(uninterrupted)
    )
    assert state["trainer"]["seconds"] > 0
    assert state["policy"] == {"optimizer_steps": 4, "skipped_in_a_row": 0}


@pytest.mark.long
def test_a_run_keeps_the_checkpoints_that_it_was_told_to(nano: Path, tmp_path: Path) -> None:
    rules = {"max_ckpts_to_keep": 1, "ckpt_keep_every": 3, "ckpt_keep_best": 1}
    best = {"ckpt_best_metric": "trainer/global_step", "ckpt_best_is": "min"}
    train(nano, tmp_path, **SHORT, **{f"trainer__{name}": value for name, value in (rules | best).items()})
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1, 3, 4]


def test_a_checkpoint_is_read_as_the_configuration_of_its_run(nano: Path, uninterrupted: Path) -> None:
    manifest = CheckpointStore(uninterrupted / "checkpoints").manifest(4)
    trusted = {"environment.env_class": f"{nano / 'reward.py'}:in_ascii"}  # code has to be named again
    loaded = compose([str(uninterrupted / "checkpoints" / "global_step_4")], trusted)
    assert fingerprint(loaded.config) == manifest.fingerprint
    assert loaded.config.trainer.max_training_steps == 4
