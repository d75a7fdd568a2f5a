"""Functions, classes and objects given in Python where a configuration has an import path."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import ConfigError, PreferenceConfig, SFTConfig, SkyRLTrainConfig, compose
from skyrl.config.loading.code_digests import IMPORTED, changed_code, code_digests
from skyrl.config.settings.environment import EnvironmentConfig
from skyrl.envs.registry import find_env
from skyrl.tree import evolve_at, get_at
from skyrl.tree.classes import fields_of
from skyrl.tree.code_names import import_path_of, source_of_program
from skyrl.tree.imports import import_object
from skyrl.tree.types import TypeMismatch
from tests.config.leaves import RUNNABLE


def reward(completion: str, **columns: object) -> float:
    return 1.0


class Judge:
    """Callable objects, and a class within a class."""

    class Inner:
        """Named by its path."""

    def __call__(self, completion: str, **columns: object) -> float:
        return 0.5


judge = Judge()
unnamed = lambda completion, **columns: 0.0  # noqa: E731  # a notebook has such rewards


@pytest.mark.parametrize("thing", [reward, Judge, Judge.Inner, judge, unnamed, Path.exists])
def test_what_a_module_defines_is_named_by_a_path_that_finds_it_again(thing: object) -> None:
    assert import_object(import_path_of(thing)) is thing


@pytest.mark.parametrize(
    "thing",
    [
        lambda completion: 1.0,
        functools.partial(reward, width=2),
        Judge(),
        (lambda: reward.__get__(1))(),
        (lambda: type("Made", (), {}))(),
        (lambda inner: lambda completion: inner)(1),
    ],
)
def test_what_would_not_be_found_again_is_refused_with_a_remedy(thing: object) -> None:
    with pytest.raises(TypeMismatch, match="has no name under which it is found again") as refused:
        import_path_of(thing)
    assert "outside of any function" in refused.value.hint


def test_an_object_of_a_file_is_named_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").write_text("def mine(completion, **columns): return 1.0\n")
    value = import_object(f"{tmp_path}/here.py:mine")
    assert import_path_of(value) == f"{(tmp_path / 'here.py').resolve()}:mine"
    monkeypatch.chdir(tmp_path)
    assert import_path_of(value) == "here.py:mine"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], object]:
    """Defines something as the program or notebook that runs does, with a source that Python knows."""

    def define(name: str, source: str) -> object:
        import linecache

        file = f"<cell {hash(source)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(source, file, "exec"), names)
        monkeypatch.setattr(sys.modules["__main__"], name, names[name], raising=False)
        return names[name]

    return define


GIVES = "def given(completion, **columns):\n    return {}\n"


def test_what_a_notebook_defines_is_found_in_it_with_its_source(program: Callable[[str, str], object]) -> None:
    function = program("given", GIVES.format(1.0))
    assert import_path_of(function) == "__main__:given"
    assert import_object("__main__:given") is function
    assert source_of_program("__main__:given") == GIVES.format(1.0)


def test_a_cell_that_is_run_again_replaces_the_reward(program: Callable[[str, str], object]) -> None:
    rewards = []
    for value in (1.0, 0.25):
        program("given", GIVES.format(value))
        rewards.append(find_env("__main__:given")({"ground_truth": ""}).step("x").reward)
    assert rewards == [1.0, 0.25]


def test_a_cell_that_was_changed_is_seen_by_its_digest(program: Callable[[str, str], object]) -> None:
    digests = []
    for value in (1.0, 1.0, 0.25):
        run = compose([], {**RUNNABLE, "environment.env_class": program("given", GIVES.format(value))}).config
        digests.append(code_digests(run))
    assert changed_code(digests[0], digests[1]) == {}
    assert [*changed_code(digests[1], digests[2])] == ["environment.env_class: __main__:given"]


@pytest.mark.parametrize("path", IMPORTED)
def test_every_field_that_names_code_takes_an_object(path: str) -> None:
    is_list = path.rpartition(".")[2] in ("callbacks", "logger", "loss_type")
    kinds = (SkyRLTrainConfig, SFTConfig, PreferenceConfig)
    run = evolve_at(
        next(kind for kind in kinds if path.partition(".")[0] in fields_of(kind))(),
        path,
        [reward] if is_list else reward,
    )
    name = f"{__name__}:reward"
    assert get_at(run, path) == ((name,) if is_list else name)


def test_no_other_text_takes_an_object() -> None:
    with pytest.raises(ConfigError, match="is not text"):
        compose([], {**RUNNABLE, "trainer.run_name": reward})


def test_a_table_and_a_list_take_objects() -> None:
    several: Any = [reward, judge]
    assert EnvironmentConfig(env_class=several).names == (f"{__name__}:reward", f"{__name__}:judge")
    run = compose([], {**RUNNABLE, "environment": {"env_class": reward}}).config
    assert run.environment.env_class == f"{__name__}:reward"


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"environment.skyrl_gym.isolate_user_env": True}, "environment.env_class"),
        ({"trainer.placement.executor": "ray"}, "trainer.algorithm.policy_loss_type"),
    ],
)
def test_code_of_a_notebook_is_refused_where_another_process_would_import_it(
    program: Callable[[str, str], object], changes: dict[str, object], path: str
) -> None:
    function = program("given", "def given(log_probs, old_log_probs, advantages): ...\n")
    with pytest.raises(ConfigError) as refused:
        compose([], {**RUNNABLE, **changes, path: function})
    messages = [problem.message + problem.hint for problem in refused.value.problems if problem.path == path]
    assert any(
        "defined in the program or notebook that runs" in message and "into a file" in message for message in messages
    )
