"""Checks: each one fires where it should, and is silent where it should."""

from __future__ import annotations

import re
from datetime import date
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, check, compose, load
from skyrl.config.loading.kinds import KINDS, RL, root_of
from skyrl.errors import ConfigError
from skyrl.tree.classes import leaf_paths, table_paths
from skyrl.tree.rules import find_problems, paths_read
from tests.config.check_cases import EDGES, FIRES, SILENT
from tests.config.check_cases.settings import CRITIC, ENGINE, TURNS, resolved
from tests.config.leaves import LEAVES, RUNNABLE, each

SEARCH_URL = "environment.skyrl_gym.search.search_url"
PATHS = set(LEAVES) | set(table_paths(SkyRLTrainConfig))
FREE_FORM = tuple(f"{path}." for path in LEAVES if path.endswith(("_kwargs", "reasoning_gym.tasks")))
NAMED: dict[str, Any] = {function.__name__: function for function in RL.checks}
PYTHON = re.compile(r"\b(True|False|None)\b|FrozenDict|\(\)|,\)|datetime")
"""What no file of a run has: Python's words, tuples and classes."""
CASES = [(name, values, path) for name, cases in FIRES.items() for values, path in cases]


def test_a_run_without_mistakes_has_no_problems() -> None:
    assert check(resolved({})) == []


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({SEARCH_URL: "http://***@retriever/"}, SEARCH_URL),
        ({"trainer.project_name": "***"}, "trainer.project_name"),
        ({"data.train_data": ["rows.jsonl", "https://***@host/rows.jsonl"]}, "data.train_data.1"),
        ({ENGINE + "engine_init_kwargs": {"a.b": {"token": "***"}}}, ENGINE + 'engine_init_kwargs."a.b".token'),
    ],
)
def test_what_was_hidden_is_given_again(values: dict[str, Any], path: str) -> None:
    problem = next(
        candidate
        for candidate in check(resolved(values))
        if candidate.severity == "error" and "***" in candidate.message
    )
    assert problem.path == path


def test_what_was_hidden_is_given_again_in_runs_of_every_kind() -> None:
    with pytest.raises(ConfigError, match=r"train_datasets\.0  .*give the secret again  argument 2"):
        compose([], ["kind=sft", "train_datasets=['https://***@host/rows.jsonl']", "model.path=a/b"])


def test_what_only_looks_like_something_hidden_is_not() -> None:
    assert check(resolved({SEARCH_URL: "http://user@retriever/**"})) == check(resolved({SEARCH_URL: "http://user@a/"}))


def test_every_check_has_a_case() -> None:
    assert FIRES.keys() == NAMED.keys()


@each(CASES)
def test_a_check_fires(case: tuple[str, dict[str, Any], str]) -> None:
    name, values, path = case
    [problem] = NAMED[name](resolved(values))
    assert problem.path == path
    assert problem.message
    assert not PYTHON.search(f"{problem.message} {problem.hint}"), problem


@pytest.mark.parametrize(
    "value", [True, None, [], [[None, True]], {}, {"a": {"b": [False, None]}}, date(2024, 1, 31)], ids=repr
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_message_shows_a_value_as_python_writes_it(kind: str, value: Any) -> None:
    root = root_of(kind)
    with pytest.raises(ConfigError) as caught:
        load([], {path: value for path, _ in leaf_paths(root) if path != "kind"}, root)
    messages = [f"{problem.path}: {problem.message} {problem.hint}" for problem in caught.value.problems]
    assert len(messages) > 30
    assert [message for message in messages if PYTHON.search(message)] == []


@each(NAMED)
def test_a_check_is_silent_on_a_run_without_mistakes(name: str) -> None:
    assert list(NAMED[name](resolved({}))) == []


@each([*SILENT.items(), *EDGES])
def test_a_check_is_silent_near_by(case: tuple[str, dict[str, Any]]) -> None:
    name, values = case
    assert list(NAMED[name](resolved(values))) == []


@pytest.mark.parametrize(
    ("values", "which"),
    [
        ({"generator.chat_template.name_or_path": "qwen3_with_thinking"}, "generator.chat_template"),
        ({"generator.step_wise_trajectories": True}, "generator.step_wise_trajectories"),
    ],
)
def test_the_setting_that_makes_several_samples_of_a_trajectory_is_named(values: dict[str, Any], which: str) -> None:
    [problem] = NAMED["returns_need_single_sample_trajectories"](resolved(CRITIC | TURNS | values))
    assert f"with {which} a trajectory can be several" in problem.message


@pytest.mark.long
@each(CASES)
def test_a_problem_is_about_a_path_that_exists_and_has_a_remedy_or_is_a_warning(
    case: tuple[str, dict[str, Any], str],
) -> None:
    name, values, _ = case
    [problem] = NAMED[name](resolved(values))
    assert problem.path in PATHS or problem.path.startswith(FREE_FORM)
    assert problem.hint or problem.severity == "warning"


@each(NAMED)
def test_a_check_says_in_a_sentence_what_must_hold(name: str) -> None:
    assert NAMED[name].__doc__


def test_problems_have_the_place_of_what_they_are_about() -> None:
    words = [f"{path}={value}" for path, value in RUNNABLE.items()]
    with pytest.raises(ConfigError) as caught:
        compose([], [*words, "trainer.policy_mini_batch_size=300", "generator.max_input_length=3"])
    assert [(problem.path, problem.location) for problem in caught.value.problems] == [
        ("trainer.policy_mini_batch_size", "argument 4"),
        ("generator.max_input_length", "argument 5"),
    ]


def test_several_checks_fire_at_once() -> None:
    values = {"trainer.policy_mini_batch_size": 300, "data.train_data": [], "trainer.algorithm.temperature": 0.5}
    assert {problem.path for problem in check(resolved(values))} == values.keys()


def test_without_origins_written_means_other_than_the_default() -> None:
    run = resolved({"trainer.algorithm.sapo.tau_pos": 2.0})
    assert [(problem.path, problem.severity) for problem in check(run)] == [("trainer.algorithm.sapo", "warning")]


def test_what_was_derived_was_not_written() -> None:
    off = {"trainer.algorithm.use_kl_loss": False, "trainer.eval_interval": -1, "trainer.eval_before_train": False}
    assert check(resolved(off)) == []


@pytest.mark.long
@each(CASES)
def test_a_check_is_skipped_where_it_reads_a_broken_value(case: tuple[str, dict[str, Any], str]) -> None:
    name, values, _ = case
    run, named = resolved(values), NAMED[name]
    assert len(find_problems(run, [named], {})) == 1
    for broken in paths_read(named, run):
        assert find_problems(run, [named], {}, {broken}) == []


def test_broken_values_of_a_run_reach_its_checks() -> None:
    run = resolved({"trainer.policy_mini_batch_size": 300})
    assert len(check(run, {})) == 1
    assert check(run, {}, {"trainer.policy_mini_batch_size"}) == []
