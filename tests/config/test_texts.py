"""Texts that were written for another program's variables, and names that no file system takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import ConfigError, check, compose, load
from skyrl.config.checks.texts import FREE, MAY_BE_EMPTY, refused_file_name
from skyrl.config.loading.check import check as check_of_any
from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.sweeps.sweep_file import load_sweep
from skyrl.tree.classes import leaf_paths
from skyrl.tree.types import is_mapping, is_union, list_arm
from tests.config.check_cases.settings import resolved
from tests.config.leaves import RUNNABLE, each

LONG = "n" * 300
EMPTY = "is empty, so it names nothing"
NAMES = {  # of every kind of leaf: a name, a path, a source of data, an address, a column, an import path
    "trainer.run_name": "${trainer.project_name}",
    "trainer.project_name": "a-${oc.env:USER}",
    "trainer.run_path": "$HOME/runs",
    "trainer.policy.model.path": "${MODEL}",
    "data.train_data": ["a.jsonl", "${oc.env:DATA}/train.parquet"],
    "data.prompt_column": "${data.column}",
    "generator.inference_engine.external_server_urls": ["http://${HOST}:8000"],
    "environment.skyrl_gym.search.search_url": "http://${HOST}/retrieve",
    "environment.env_class": "$PWD/reward.py:right",
    "trainer.trackers.wandb.entity": "${ENTITY}",
}
TEXT_OF_ITS_OWN: dict[str, Any] = {
    "trainer.trackers.notes": "costs ${PRICE}",
    "generator.sampling_params.stop": ["${", "$HOME", "${END}"],
    "environment.agent.command": ["sh", "-c", "echo $(date) ${SKYRL_URL}"],
    "environment.agent.kwargs": {"prompt": "print ${x}"},
    "generator.chat_template_kwargs": {"system": "say ${name}"},
    "trainer.policy.model.lora.target_modules": ".*[qk]_proj$",
    "trainer.run_name": "a$b-100$",
}


def problems(values: dict[str, Any]) -> dict[str, tuple[str, str]]:
    loaded = load([], RUNNABLE | values)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    reported = sorted(check(run, origins), key=lambda problem: problem.severity == "error")  # of two, the error is told
    return {problem.path: (problem.severity, f"{problem.message}; {problem.hint}") for problem in reported}


@each(NAMES.items())
def test_a_reference_in_a_name_a_path_or_an_address_is_refused(case: tuple[str, Any]) -> None:
    path, value = case
    path = f"{path}.{len(value) - 1}" if isinstance(value, list) else path
    severity, message = problems({case[0]: value})[path]
    assert severity == "error"
    assert "stands there as it is: nothing replaces it" in message
    assert 'take the whole value from a variable: "env:' in message


def test_a_variable_that_is_the_whole_value_is_named_in_the_remedy() -> None:
    for text in ("$MODEL", "${MODEL}", "${oc.env:MODEL}"):
        assert problems({"trainer.policy.model.path": text})["trainer.policy.model.path"][1].endswith('"env:MODEL"')


@each(TEXT_OF_ITS_OWN.items())
def test_a_dollar_sign_is_text_where_text_is_free(case: tuple[str, Any]) -> None:
    assert not any("as it is" in message for _, message in problems(dict([case])).values())


def test_a_reference_in_a_table_of_another_program_and_a_command_of_a_shell_are_warnings() -> None:
    assert problems({"trainer.run_path": "runs/$(date +%F)"})["trainer.run_path"][0] == "warning"
    path = "generator.inference_engine.engine_init_kwargs"
    reported = problems({path: {"chat_template": "${oc.env:TEMPLATE}"}})
    assert reported[f"{path}.chat_template"][0] == "warning"


def test_what_follows_from_a_name_is_not_reported_again() -> None:
    assert list(problems({"trainer.run_name": "${x}"})) == ["trainer.run_name"]
    assert list(problems({"trainer.run_name": LONG})) == ["trainer.run_name"]


def test_every_text_of_every_kind_of_run_is_looked_at() -> None:
    missed = []
    for kind in KINDS:
        root = root_of(kind)
        for path, leaf in leaf_paths(root):
            name = path.rpartition(".")[2]
            arms = getattr(leaf.type, "__args__", ()) if is_union(leaf.type) else (leaf.type,)
            if name in FREE or is_mapping(leaf.type) or not (str in arms or list_arm(leaf.type) == tuple[str, ...]):
                continue
            text: Any = "${x}" if str in arms else ["${x}"]
            try:
                run = load([], {"kind": kind, path: text}).config
            except ConfigError:  # its own rule takes no such text
                continue
            reported = [problem for problem in check_of_any(run) if "as it is" in problem.message]
            missed += [] if [problem.severity for problem in reported] == ["error"] else [path]
    assert missed == []


@pytest.mark.parametrize("blank", ["", " "])
def test_no_text_of_any_kind_of_run_is_taken_for_nothing_where_it_is_empty(blank: str) -> None:
    silent = set()
    for kind in KINDS:
        root = root_of(kind)
        for path, leaf in leaf_paths(root):
            arms = getattr(leaf.type, "__args__", ()) if is_union(leaf.type) else (leaf.type,)
            if is_mapping(leaf.type) or not (str in arms or list_arm(leaf.type) == tuple[str, ...]):
                continue
            for value in (*[blank] * (str in arms), *[[blank]] * (list_arm(leaf.type) == tuple[str, ...])):
                try:
                    run = load([], {"kind": kind, path: value}).config
                except ConfigError:  # its own rule takes no such text
                    continue
                told = [problem for problem in check_of_any(run) if problem.path.startswith(path)]
                if ("error", EMPTY) not in [(problem.severity, problem.message) for problem in told]:
                    silent.add(path.rpartition(".")[2])
    assert silent <= set(MAY_BE_EMPTY)


def test_an_empty_text_is_told_at_its_place_and_nothing_more_is_said_of_it() -> None:
    assert problems({"trainer.teacher.model.path": "", "trainer.algorithm.distillation.coef": 0.5}) == {
        "trainer.teacher.model.path": ("error", f"{EMPTY}; give it a value, or leave it out")
    }
    assert list(problems({"data.train_data": ["a.jsonl", ""]})) == ["data.train_data.1"]
    assert list(problems({"trainer.policy.model.path": ""})) == ["trainer.policy.model.path"]
    assert list(problems({"trainer.run_name": ""})) == ["trainer.run_name"]


@pytest.mark.parametrize(
    "path",
    [
        "trainer.run_name",
        "trainer.project_name",
        "trainer.run_path",
        "trainer.export_path",
        "trainer.policy.model.path",
    ],
)
def test_a_name_longer_than_a_file_system_takes_is_refused(path: str) -> None:
    severity, message = problems({path: f"{LONG}" if path.endswith("name") else f"runs/{LONG}/x"})[path]
    assert (severity, message) == (
        "error",
        f"{'n' * 30}... has 300 bytes, but the name of a file has at most 255; choose a shorter one",
    )


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("n" * 255, False),
        ("n" * 256, True),
        ("é" * 128, True),  # two bytes each
        ("a/" * 500, False),
        (f"https://host/{LONG}", False),
        (f"~/{LONG}/run", True),
    ],
)
def test_a_name_has_255_bytes(text: str, is_refused: bool) -> None:
    assert (refused_file_name(text) is not None) == is_refused


def test_the_column_of_a_data_set_may_be_as_long_as_it_is() -> None:
    assert problems({"data.prompt_column": LONG}) == {}


@pytest.mark.parametrize("name", [LONG, "é" * 200, f"a/{LONG}", f"{LONG}/a", "${HOME}"])
def test_init_makes_nothing_under_a_name_that_no_run_can_have(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["init", "--no-model", name])
    assert isinstance(result.exception, Exception) and type(result.exception).__name__ == "UserError"
    assert ("at most 255" in str(result.exception)) == (name != "${HOME}")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["name", "folder"])
def test_a_sweep_is_refused_under_such_a_name(field: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f'run = ["run.toml"]\n{field} = "{LONG}"\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_sweep(str(file))
    assert [(problem.path, problem.hint) for problem in refused.value.problems] == [(field, "choose a shorter one")]


def test_supervised_runs_have_the_same_checks() -> None:
    with pytest.raises(ConfigError) as refused:
        compose([], {"kind": "sft", "model.path": "m", "train_datasets": ["$DATA/x.jsonl"], "run_name": LONG})
    assert {problem.path for problem in refused.value.problems} == {"train_datasets.0", "run_name"}


def test_without_origins_the_whole_tree_is_looked_at() -> None:
    assert [problem.path for problem in check(resolved({"trainer.run_name": "${x}"})) if problem.severity == "error"]
