"""`skyrl init`: a folder with a task that trains at once."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import compose
from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.starter.template_files import TEMPLATES
from skyrl.tree.schema import json_schema
from tests.experiments.phases import command
from tests.forkserver import CONTEXT

ROOT = Path(__file__).parents[2]


def init(folder: Path, *options: str) -> str:
    """Output of a command that succeeds."""
    result = CliRunner().invoke(cli, ["init", str(folder), *options])
    assert result.exit_code == 0, result.output
    return result.output


def skyrl(folder: Path, *arguments: str) -> str:
    """Output of a process that ran in `folder` and succeeded."""
    command = [sys.executable, "-m", "skyrl.cli", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_files_of_a_template_are_a_run_with_the_name_of_the_folder(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = init(tmp_path / "mine", "--template", template, "--no-model")
    assert "python prepare.py" in output and "skyrl run run.toml" in output
    monkeypatch.chdir(tmp_path / "mine")
    composed = compose(["run.toml"])
    names = [origins for path, origins in composed.origins.items() if path.endswith("run_name")]
    assert [origins[-1].kind for origins in names] == ["file"] and composed.warnings == ()
    text = Path("run.toml").read_text()
    assert 'run_name = "mine"\nrun_path = "runs/mine"' in text
    assert text.startswith("#:schema skyrl.schema.json\n")
    schema = json.loads(Path("skyrl.schema.json").read_text())
    assert schema == json_schema(type(composed.config))
    jsonschema.Draft202012Validator(schema).validate(tomllib.loads(text))
    assert {"/model/", "/runs/"} <= set(Path(".gitignore").read_text().splitlines())
    readme = Path("README.md").read_text()
    assert readme.startswith("# mine\n") and readme.count("\n5. ") == 1 and "{" not in readme
    assert ("skyrl view runs/mine" in readme) == (template not in SUPERVISED)


@pytest.mark.long
def test_the_tests_of_a_task_pass(tmp_path: Path) -> None:
    for template in WITH_TESTS:
        init(tmp_path / template, "--template", template, "--no-model")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WITH_TESTS]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


WITH_TESTS = ["reward", "environment", "tools", "agent"]
SUPERVISED = ["sft", "preference"]


@pytest.mark.parametrize("template", [*WITH_TESTS, *SUPERVISED])
def test_validation_rows_are_none_that_training_sees(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "mine", "--template", template, "--no-model")
    drawn: list[Sequence[object]] = []
    monkeypatch.setattr("skyrl.starter.tiny_chat.make_task", lambda *rows, **_: drawn.extend(rows[:2]))
    monkeypatch.syspath_prepend(tmp_path / "mine")
    for module in WITH_TESTS:
        monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_path(str(tmp_path / "mine" / "prepare.py"), run_name="__main__")
    for module in WITH_TESTS:
        sys.modules.pop(module, None)
    training, validation = ({json.dumps(row) for row in rows} for rows in drawn)
    assert len(validation) >= 4 and len(training) > 3 * len(validation) and not training & validation


def test_an_editor_finds_the_schema_of_every_example() -> None:
    files = sorted((ROOT / "examples").rglob("*.toml"))
    validators = {kind: jsonschema.Draft202012Validator(json_schema(root_of(kind))) for kind in KINDS}
    assert len(files) > 10
    for file in files:
        text = file.read_text(encoding="utf-8")
        run, named = tomllib.loads(text), re.match(r"#:schema (\S+)\n", text)
        kind = run.get("kind", "rl")
        schema = ROOT / "schemas" / f"skyrl{'' if kind == 'rl' else f'.{kind}'}.schema.json"
        assert named is not None and (file.parent / named[1]).samefile(schema), file
        assert [error.message for error in validators[kind].iter_errors(run)] == [], file


SMALLER = ["trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_smaller_batch_of_a_template_needs_no_other_setting(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "mine", "--template", template, "--no-model")
    monkeypatch.chdir(tmp_path / "mine")
    assert compose(["run.toml"], ["batch_size=2"] if template in SUPERVISED else SMALLER).warnings == ()


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(cli, ["init", str(tmp_path)])
    assert result.exit_code != 0 and "is not empty: choose another folder" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


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


@pytest.mark.long
@pytest.mark.xdist_group("forked")
def test_a_new_task_trains_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    init(folder, "--template", "sft")
    process = CONTEXT.Process(target=command_in, args=(folder, "run", "run.toml", "num_steps=2", "eval_interval=2"))
    process.start()
    process.join()
    output = (folder / "said").read_text(encoding="utf-8")
    assert process.exitcode == 0, output
    assert "eval/all/loss" in output and "at step 1," in output and "at step 2\n" in output


@pytest.mark.long
def test_a_model_learns_the_pairs_of_its_template(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    init(folder, "--template", "preference")
    skyrl(folder, "run", "run.toml")
    evaluation = json.loads(skyrl(folder, "eval", "runs/mine", "--json"))["result"]
    assert evaluation["metrics"]["eval/all/accuracy"] > 0.95 and evaluation["metrics"]["eval/all/margin"] > 1


@pytest.mark.long
@pytest.mark.parametrize("template", [name for name in TEMPLATES if name not in SUPERVISED])
def test_a_model_learns_the_task_of_a_template(template: str, tmp_path: Path) -> None:
    init(tmp_path / "mine", "--template", template)
    before, after = skyrl(tmp_path / "mine", "run", "run.toml").splitlines()[-1].split()[2::2]
    assert float(before) < 0.5 and float(after) > 0.8
