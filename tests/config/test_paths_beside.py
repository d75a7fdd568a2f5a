"""A path that exists beside the configuration file, and not where paths start, is told with the folder to go to."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import ConfigError

RUN = """
[data]
train_data = ["data/train.jsonl"]
val_data = "data/validation.jsonl:train"
[environment]
env_class = "reward.py:score"
[trainer]
device = "cpu"
logger = "console"
[trainer.policy.model]
path = "model"
[generator.inference_engine]
backend = "torch"
"""
FIELDS = ("data.train_data", "data.val_data", "environment.env_class", "trainer.policy.model.path")
HERE = "run the command in mine; paths start at the working directory"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run and what it names in the folder `mine`."""
    monkeypatch.chdir(tmp_path)
    for path in ("data/train.jsonl", "data/validation.jsonl", "model/config.json", "reward.py"):
        file = tmp_path / "mine" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "mine" / "run.toml").write_text(RUN)
    return tmp_path


def hints(*words: str) -> dict[str, str]:
    """Path of each problem that doctor finds -> its hint."""
    error = CliRunner().invoke(cli, ["doctor", *words]).exception
    assert isinstance(error, ConfigError)
    return {problem.path: problem.hint for problem in error.problems}


def test_each_path_beside_the_file_is_told_with_its_folder() -> None:
    names = ("mine/data/train.jsonl", "mine/data/validation.jsonl", "mine/reward.py", "mine/model")
    remedies = hints("mine/run.toml")
    assert {field: remedies[field] for field in FIELDS} == {
        field: f"{name} exists: {HERE}" for field, name in zip(FIELDS, names, strict=True)
    }


def test_a_path_that_is_nowhere_or_an_argument_has_no_such_hint(folder: Path) -> None:
    (folder / "mine" / "data" / "train.jsonl").unlink()
    remedies = hints("mine/run.toml", "trainer.policy.model.path=model")
    assert HERE not in remedies["data.train_data"] and HERE not in remedies["trainer.policy.model.path"]
    assert HERE in remedies["data.val_data"]


def test_in_the_folder_of_the_file_there_is_nothing_to_tell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "mine")
    assert not any(HERE in hint for hint in hints("run.toml", 'data.train_data=["gone.jsonl"]').values())
