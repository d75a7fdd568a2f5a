"""A configuration that was stored, perhaps by somebody else, runs no code and reads no variable of its own accord."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import ConfigError, SkyRLTrainConfig, compose, load
from skyrl.config.loading.code_digests import code_digests
from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.config.loading.stored import stored_form
from skyrl.config.loading.stored_code import IMPORTED
from skyrl.config.loading.user_code import record_code
from skyrl.config.settings.environment import McpServerConfig
from skyrl.tree import evolve_at
from skyrl.tree.classes import docs_of, fields_of, tables_of
from tests.config.leaves import RUNNABLE

SPEAKING_OF_IMPORTS = ("import path", "Import path", "file.py:")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A module that leaves a file beside itself when it is imported."""
    module = tmp_path / "canary.py"
    module.write_text(
        "from pathlib import Path\nPath(__file__).with_name('imported').touch()\ndef thing(*_, **__): return 0.0\n"
    )
    return module


def checkpoint(folder: Path, changes: dict[str, Any], file: str = "manifest.json") -> Path:
    """What a checkpoint or run of somebody else's says, with the changes."""
    of_rl = all(path.partition(".")[0] in fields_of(SkyRLTrainConfig) for path in changes)
    supervised = {"kind": "sft", "device": "cpu", "train_datasets": ["x.jsonl"], "model.path": "x/y", "num_steps": 1}
    supervised |= {"kind": "preference"} if "loss_type" in changes else {}
    run: Any = compose([], RUNNABLE if of_rl else supervised).config
    for path, value in changes.items():
        run = evolve_at(run, path, value)
    checkpoint_folder = folder / "global_step_4"
    checkpoint_folder.mkdir(exist_ok=True)
    (checkpoint_folder / file).write_text(json.dumps(stored_form(run)))
    return checkpoint_folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("file", ["manifest.json", "config.json"])
@pytest.mark.parametrize("path", IMPORTED)
def test_an_import_path_that_only_a_checkpoint_names_is_refused_and_not_imported(
    canary: Path, tmp_path: Path, path: str, file: str
) -> None:
    is_list = path.rpartition(".")[2] in ("callbacks", "loss_type")
    code = f"{canary}:thing"
    stored = checkpoint(tmp_path, {path: (code,) if is_list else code}, file)
    load([stored])
    with pytest.raises(ConfigError, match=rf"{path}.*is code that only the stored run names") as refused:
        compose([stored])
    named = f"'[\"{code}\"]'" if is_list else code
    assert f"name it in this command, too: {path}={named}" in str(refused.value)
    assert not canary.with_name("imported").exists()


def test_an_import_path_that_is_given_again_is_followed(canary: Path, tmp_path: Path) -> None:
    word = f"environment.env_class={canary}:thing"
    stored = checkpoint(tmp_path, {"environment.env_class": f"{canary}:thing"})
    assert compose([stored], [word]).config.environment.env_class == f"{canary}:thing"


def test_a_program_that_is_given_again_is_started(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path, {"environment.agent.command": ("./agent", "--fast")})
    with pytest.raises(ConfigError) as refused:
        compose([stored])
    [word] = shlex.split(str(refused.value).split("name it in this command, too: ")[1].strip())
    assert compose([stored], [word]).config.environment.agent.command == ("./agent", "--fast")


@pytest.mark.parametrize(
    "changes",
    [
        {"generator.inference_engine.engine_init_kwargs": {"trust_remote_code": True}},
        {"trainer.placement.executor": "ray", "trainer.placement.ray_address": "10.0.0.1:6379"},
        {"environment.agent.command": ("./agent", "--fast")},
        {"environment.skyrl_gym.mcp.servers": (McpServerConfig(command=("./server",)),)},
    ],
)
def test_engine_arguments_clusters_and_programs_that_only_a_checkpoint_names_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="is code that only the stored run names"):
        compose([checkpoint(tmp_path, changes)])


def test_a_variable_that_only_a_checkpoint_names_is_not_read(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path, {"trainer.run_name": "env:PATH"})
    assert load([stored], environ={"PATH": "secret"}).config.trainer.run_name == "env:PATH"


@pytest.mark.parametrize(
    "content",
    [
        {"environment": {"env_class": "canary.py:thing"}},
        {"extends": "../user.json", **stored_form(SkyRLTrainConfig())},
    ],
)
def test_a_checkpoint_cannot_pass_for_a_file_that_a_person_wrote(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "user.json").write_text(json.dumps({"environment": {"env_class": "canary.py:thing"}}))
    checkpoint_folder = tmp_path / "global_step_4"
    checkpoint_folder.mkdir()
    (checkpoint_folder / "manifest.json").write_text(json.dumps(content))
    for name in (checkpoint_folder, checkpoint_folder / "manifest.json"):
        with pytest.raises(ConfigError, match="is not the stored configuration of a run|this file was edited"):
            load([name])


STARTED: dict[str, Any] = {"environment.env_class": "own/canary.py:thing"}


@pytest.fixture
def started(canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that this user has started, with code that imports a neighbour, and its own state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    text = canary.read_text()
    (tmp_path / "own" / "canary.py").write_text("import neighbour\n" + text)
    (tmp_path / "own" / "neighbour.py").write_text("BONUS = 0\n")
    run = stored_run(tmp_path / "run", STARTED)
    record_code(run, [str(tmp_path / "run"), "s3://bucket/checkpoints"])
    return tmp_path / "run"


def stored_run(folder: Path, changes: Mapping[str, Any]) -> SkyRLTrainConfig:
    """A run whose folder stores its configuration, with digests of its code."""
    run = compose([], RUNNABLE).config
    for path, value in changes.items():
        run = evolve_at(run, path, value)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stored_form(run) | {"code": code_digests(run)}))
    return run


def test_code_of_a_run_that_this_user_started_need_not_be_named_again(started: Path, tmp_path: Path) -> None:
    assert compose(["run"]).config.environment.env_class == STARTED["environment.env_class"]
    assert compose([started]).config.environment.env_class == STARTED["environment.env_class"]
    (tmp_path / "link").symlink_to(started)
    compose(["link"])


def a_line_is_added(started: Path) -> None:
    with (started.parent / "own" / "canary.py").open("a") as file:
        file.write("# and more")


def other_places(started: Path) -> Path:
    shutil.copytree(started.parent / "own", started.parent / "stranger" / "own")
    shutil.copytree(started, started.parent / "stranger" / "run")
    os.chdir(started.parent / "stranger")
    return started.parent / "stranger" / "run"


FORGERIES: dict[str, Callable[[Path], object]] = {
    "the code has changed": a_line_is_added,
    "what it imports has changed": lambda started: (started.parent / "own" / "neighbour.py").write_text("BONUS = 1\n"),
    "what it imports is gone": lambda started: (started.parent / "own" / "neighbour.py").unlink(),
    "another function of the file is named": lambda started: stored_run(
        started, {"environment.env_class": "own/canary.py:Path"}
    ),
    "another module is named": lambda started: stored_run(started, {"environment.env_class": "os:system"}),
    "another field names the code": lambda started: stored_run(
        started, {"trainer.algorithm.policy_loss_type": "own/canary.py:thing"}
    ),
    "a program is named, too": lambda started: stored_run(started, STARTED | {"environment.agent.command": ("./a",)}),
    "an engine has arguments": lambda started: stored_run(
        started, STARTED | {"generator.inference_engine.engine_init_kwargs": {"trust_remote_code": True}}
    ),
    "it was moved to another folder": lambda started: started.rename(started.parent / "stranger"),
    "a checkpoint lies in another folder": lambda started: checkpoint(started.parent, STARTED),
    "run and code are a copy": other_places,
    "nothing is recorded": lambda started: shutil.rmtree(started.parent / "state"),
    "the record is damaged": lambda started: (started.parent / "state" / "skyrl" / "code_of_runs").write_bytes(
        b"\xff\0"
    ),
}
"""What may have happened to a run that was started; a path is the folder that is read."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_other_code_than_that_of_the_started_run_is_refused_and_not_imported(
    started: Path, tmp_path: Path, forgery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forged = FORGERIES[forgery](started)
    with pytest.raises(ConfigError, match="is code that only the stored run names") as refused:
        compose([forged if isinstance(forged, Path) else started])
    assert "pass --trust, or name it in this command" in str(refused.value)
    assert not list(tmp_path.rglob("imported"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_everything_that_a_trusted_run_names_is_followed(started: Path, forgery: str) -> None:
    forged = FORGERIES[forgery](started)
    run = str(forged if isinstance(forged, Path) else started)
    result = CliRunner().invoke(cli, ["config", "check", run, "--no-code", "--trust"])
    assert "is code that only the stored run names" not in f"{result.output}{result.exception}"
    with pytest.raises(ConfigError, match="is code that only the stored run names"):  # the next does not trust it
        compose([checkpoint(started.parent, {"environment.env_class": "os:system"})])


def test_a_state_folder_that_cannot_be_written_keeps_no_run_from_starting(
    started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    record_code(stored_run(started, STARTED), [str(started)])
    with pytest.raises(ConfigError, match="is code that only the stored run names"):
        compose([started])


def test_every_field_whose_docstring_speaks_of_an_import_path_is_among_those_that_are_refused() -> None:
    def documented(cls: type[Any], prefix: str) -> set[str]:
        fields = {
            prefix + name for name, text in docs_of(cls).items() if any(word in text for word in SPEAKING_OF_IMPORTS)
        }
        for name, table in tables_of(cls).items():
            fields |= documented(table, f"{prefix}{name}.")
        return fields

    named = set().union(*(documented(root_of(kind), "") for kind in KINDS))
    assert named - {"environment.skyrl_gym.isolate_user_env"} == set(IMPORTED)  # which says how env_class runs
