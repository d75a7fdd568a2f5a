"""`skyrl init`: a folder with a task that trains at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import compose
from skyrl.starter.template_files import TEMPLATES
from tests.experiments.phases import command
from tests.forkserver import CONTEXT


def init(folder: Path, *options: str) -> str:
    """Output of a command that succeeds."""
    result = CliRunner().invoke(cli, ["init", str(folder), *options])
    assert result.exit_code == 0, result.output
    return result.output


def skyrl(folder: Path, *arguments: str) -> str:
    """Output of a process that ran in `folder` and succeeded."""
    command = [sys.executable, "-m", "skyrl.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_files_of_a_template_are_a_run_with_the_name_of_the_folder(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = init(tmp_path / "mine", "--template", template, "--no-model")
    assert "python prepare.py" in said and "skyrl run run.toml" in said
    monkeypatch.chdir(tmp_path / "mine")
    composed = compose(["run.toml"])
    names = [origins for path, origins in composed.origins.items() if path.endswith("run_name")]
    assert [origins[-1].kind for origins in names] == ["file"] and composed.warnings == ()
    assert 'run_name = "mine"\nrun_path = "runs/mine"' in Path("run.toml").read_text()


SMALLER = ["trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_smaller_batch_of_a_template_needs_no_other_setting(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "mine", "--template", template, "--no-model")
    monkeypatch.chdir(tmp_path / "mine")
    assert compose(["run.toml"], ["batch_size=2"] if template == "sft" else SMALLER).warnings == ()


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(cli, ["init", str(tmp_path)])
    assert result.exit_code != 0 and "is not empty: choose another folder" in str(result.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ['a"b', "a\nb"])
def test_a_name_that_no_file_could_hold_is_refused(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["init", str(tmp_path / name)])
    assert result.exit_code != 0 and "cannot be the name of a run" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_script_that_fails_is_reported_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "random.py").write_text("raise OSError('no room left')")
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "mine"), "--template", "sft"])
    assert result.exit_code != 0 and "python prepare.py failed there: OSError: no room left" in str(result.exception)


def command_in(folder: Path, *words: str) -> None:
    """A command in a forked process, whose output goes to the file `said` in the folder."""
    os.chdir(folder)
    command([*words], {}, folder, verbs=())


@pytest.mark.xdist_group("forked")
def test_a_new_task_trains_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    init(folder, "--template", "sft")
    process = CONTEXT.Process(target=command_in, args=(folder, "run", "run.toml", "num_steps=2", "eval_interval=2"))
    process.start()
    process.join()
    said = (folder / "said").read_text(encoding="utf-8")
    assert process.exitcode == 0, said
    assert "eval/all/loss" in said and "at step 1," in said and "at step 2\n" in said


@pytest.mark.long
@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "sft"])
def test_a_model_learns_the_task_of_a_template(template: str, tmp_path: Path) -> None:
    init(tmp_path / "mine", "--template", template)
    before, after = skyrl(tmp_path / "mine", "run", "run.toml").splitlines()[-1].split()[2::2]
    assert float(before) < 0.5 and float(after) > 0.8
