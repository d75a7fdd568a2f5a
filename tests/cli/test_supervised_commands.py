"""The commands that look at a configuration, on files of supervised runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from skyrl.cli.command_line.arguments import paths_from
from skyrl.cli.main import cli
from skyrl.config import ConfigError, RewardModelConfig, SFTConfig, load

SFT = 'kind = "sft"\ntrain_datasets = ["rows.jsonl"]\nbatch_size = 8\n[model]\npath = "a/b"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.toml").write_text(SFT)
    (tmp_path / "rl.toml").write_text('[trainer]\nlogger = "console"\n')
    return tmp_path


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def problems(*arguments: str) -> dict[str, str]:
    """What is wrong, path by path, with its hint."""
    with pytest.raises(ConfigError) as refused:
        load(
            ["sft.toml"] if arguments and arguments[0] == "sft.toml" else [],
            list(arguments[arguments[:1] == ("sft.toml",) :]),
        )
    return {problem.path: f"{problem.message}; {problem.hint}" for problem in refused.value.problems}


@pytest.mark.parametrize(
    "arguments", [["config", "check"], ["config", "show"], ["config", "docs"], ["config", "schema"]]
)
def test_a_supervised_file_is_understood(folder: Path, arguments: list[str]) -> None:
    result = invoked(*arguments, "sft.toml")
    assert result.exit_code == 0, result.output


def test_what_a_sparse_dump_says_is_the_same_run(folder: Path) -> None:
    for language in ("toml", "yaml", "json"):
        dumped = folder / f"again.{language}"
        dumped.write_text(invoked("config", "show", "sft.toml", "--sparse", "--format", language).output)
        assert load([str(dumped)]).config == load(["sft.toml"]).config


def test_a_field_is_explained_with_its_place(folder: Path) -> None:
    output = invoked("config", "explain", "batch_size", "sft.toml").output
    assert "batch_size = 8" in output and "sft.toml:3  8" in output and "batch_divides_over_ranks" in output


def test_runs_of_two_kinds_differ_in_their_kind(folder: Path) -> None:
    result = invoked("config", "diff", "sft.toml", "rl.toml", "--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["result"] == [{"path": "kind", "before": "sft", "after": "rl"}]
    (folder / "other.toml").write_text(SFT + "[optimizer_config]\nlr = 0.1\n")
    assert invoked("config", "diff", "sft.toml", "other.toml").output == "optimizer_config.lr  2e-05  ->  0.1\n"


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_is_about_sampling_alone_says_so(folder: Path, command: str) -> None:
    refused: Any = invoked(command, "sft.toml").exception
    assert "kind = sft: " in str(refused) and "nothing" in str(refused)


def test_a_file_that_forgot_its_kind_is_told_that_and_nothing_else(folder: Path) -> None:
    (folder / "sft.toml").write_text(SFT.partition("\n")[2])
    [(path, message)] = problems("sft.toml").items()
    assert path == "kind" and "has no train_datasets, batch_size, model" in message and 'write kind = "sft"' in message


def test_a_kind_that_is_misspelt_is_told_and_the_rest_judged_as_what_was_meant(folder: Path) -> None:
    messages = problems("kind=stf", "batchsize=3", "num_epochs=2")
    assert "'stf' is not one of: rl, sft, reward_model, preference" in messages["kind"]
    assert "did you mean batch_size?" in messages["batchsize"] and "num_epochs" not in messages


def test_a_name_of_another_kind_of_run_is_told_to_be_one(folder: Path) -> None:
    messages = problems("sft.toml", "trainer.epochs=3", "chosen_key=a")
    assert "trainer belongs to kind = rl, and this is kind = sft" in messages["trainer.epochs"]
    assert "chosen_key belongs to kind = reward_model and preference, and this is kind = sft" in messages["chosen_key"]


def test_paths_are_completed_in_the_tree_that_the_words_before_make(folder: Path) -> None:
    assert paths_from("train_da", arguments=["sft.toml"]) == ["train_datasets=", "train_dataset_weights="]
    assert paths_from("chosen", arguments=["kind=reward_model"]) == ["chosen_key="]
    assert paths_from("tr", arguments=["rl.toml"]) == ["trainer.", "training_service."]
    assert paths_from("chosen", ends="", every_kind=True) == ["chosen_key"]
    assert paths_from("tr", arguments=["not_there.toml"]) == ["trainer.", "training_service."]


def test_the_completion_of_the_shell_knows_the_words_before(folder: Path) -> None:
    environment = {"_SKYRL_COMPLETE": "bash_complete", "COMP_WORDS": "skyrl run sft.toml num_e", "COMP_CWORD": "3"}
    result = CliRunner().invoke(cli, env=environment, prog_name="skyrl")
    assert result.output.splitlines() == ["plain,num_epochs=", "file,num_e"]
    assert isinstance(load(["sft.toml"]).config, SFTConfig)


def test_the_last_kind_counts(folder: Path) -> None:
    run: Any = load(["sft.toml"], ["kind=reward_model", "chosen_key=better"]).config
    assert isinstance(run, RewardModelConfig) and run.chosen_key == "better"
    with pytest.raises(ConfigError, match="'rl' is not one of: sft"):
        load([], ["kind=rl"], SFTConfig)
