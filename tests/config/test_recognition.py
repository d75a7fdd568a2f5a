"""What is given in place of a configuration is named, with the command or the argument that was meant."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import SFTConfig, load
from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.config.loading.recognition import (
    TABLES_OF_SUPERVISED,
    refuse_other_sources,
    refuse_other_tables,
)
from skyrl.errors import ConfigError
from skyrl.tree import get_at

VERL = "#!/bin/bash\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b data.train_batch_size=8\n"
TRL_PROGRAM = "from trl import GRPOConfig\nGRPOConfig(learning_rate=1e-6)\n"
OTHERS = json.loads((Path(__file__).parents[1] / "reference" / "other_systems_2026_08.json").read_text())
"""Names at the top of files, and options in scripts, of systems that are not converted: a dozen files of each."""

TRL = "#!/bin/bash\ntrl grpo --model_name_or_path a/b --dataset_name c/d\n"


def refusal(*words: str) -> str:
    """What each command says of the words, in place of a traceback."""
    for command in (["config", "check", *words], ["run", *words]):
        result = CliRunner().invoke(cli, command)
        assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("files", [["config.json"], ["config.json", "model.safetensors"], ["adapter_config.json"]])
def test_a_model_folder_is_the_value_of_an_argument(files: list[str], folder: Path) -> None:
    (folder / "base").mkdir()
    for name in files:
        (folder / "base" / name).write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}))
    message = refusal("base")
    assert "this is a model folder, not a configuration" in message
    assert "trainer.policy.model.path=base" in message
    converted = CliRunner().invoke(cli, ["config", "convert", "base", "--from", "skyrl"])
    assert "this is a model folder" in str(converted.exception)


@pytest.mark.parametrize(
    ("name", "text", "message", "hint"),
    [
        ("run.sh", "python -m x trainer.epochs=1\n", "a shell script", "skyrl config convert run.sh --from skyrl"),
        ("run", "#!/usr/bin/env bash\ntrue\n", "a shell script", "skyrl config convert run --from skyrl"),
        ("verl.sh", VERL, "this is a verl script", "skyrl config convert verl.sh --from verl"),
        ("trl.sh", TRL, "this is a TRL script", "skyrl config convert trl.sh --from trl"),
        ("trl.py", TRL_PROGRAM, "this is a TRL script", "skyrl config convert trl.py --from trl"),
        ("reward.py", "def f(): ...\n", "this is a Python program", "environment.env_class=reward.py:NAME"),
        ("verl.yaml", "data: {a: 1}\nactor_rollout_ref: {model: {path: a}}\n", "a verl configuration", "--from verl"),
        ("trl.yaml", "model_name_or_path: a/b\nlearning_rate: 1e-5\n", "a TRL configuration", "--from trl"),
        ("rl.sh", "uv run rl @ rl.toml\n", "this is a prime-rl script, which skyrl does", "rl.toml --from prime-rl"),
        ("nemo.sh", "uv run examples/run_grpo.py --config a.yaml grpo.seed=1\n", "this is a NeMo-RL script", "docs/"),
        ("areal.yaml", "experiment_name: a\ntrial_name: b\nactor: {path: c}\n", "an AReaL", "areal.yaml --from areal"),
        ("sky.yaml", "resources: {cpus: 4}\nrun: python x\n", "a task for SkyPilot", "the configuration that"),
        ("rows.jsonl", '{"prompt": "a"}\n', "a file of rows", "data.train_data=[rows.jsonl]"),
        ("w.safetensors", "", "a model file", "trainer.policy.model.path=."),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_named(name: str, text: str, message: str, hint: str, folder: Path) -> None:
    (folder / name).write_text(text)
    output = refusal(name)
    assert message in output and hint in output
    assert "(1 problem)" in output


@pytest.mark.parametrize(
    ("name", "text", "house"),
    [("verl.sh", VERL, "verl"), ("trl.sh", TRL, "trl"), ("a.yaml", "actor_rollout_ref: {a: 1}\n", "verl")],
)
@pytest.mark.parametrize("other", ["skyrl", "areal"])
def test_a_file_of_another_program_is_named_by_convert(
    name: str, text: str, house: str, other: str, folder: Path
) -> None:
    (folder / name).write_text(text)
    result = CliRunner().invoke(cli, ["config", "convert", name, "--from", other])
    assert isinstance(result.exception, ConfigError)
    assert f"skyrl config convert {name} --from {house}" in str(result.exception)


@pytest.mark.parametrize("program", ["prime-rl", "NeMo-RL"])
def test_files_of_systems_that_are_not_converted_are_named(program: str) -> None:
    files = {name: top for name, top in OTHERS[program].items() if "orchestrator" not in top}
    assert len(files) >= 6
    for name, top in files.items():
        with pytest.raises(ConfigError, match=f"this is a {program} configuration, which skyrl does not convert"):
            refuse_other_tables(name, dict.fromkeys(top))


def test_files_of_prime_rls_reinforcement_learning_are_converted(folder: Path) -> None:
    files = {name: top for name, top in OTHERS["prime-rl"].items() if "orchestrator" in top}
    assert len(files) >= 6
    for name, top in files.items():
        with pytest.raises(ConfigError, match=r"(?s)a prime-rl configuration\b.*config convert .* --from prime-rl"):
            refuse_other_tables(name, dict.fromkeys(top))
        refuse_other_tables(name, dict.fromkeys(top), of="prime-rl")


def test_supervised_files_of_prime_rl_are_told_where_their_tables_are(folder: Path) -> None:
    for path in (path for paths in TABLES_OF_SUPERVISED.values() for path in paths):
        get_at(SFTConfig(), path)
    (folder / "sft.toml").write_text('max_steps = 2\n[model]\nname = "a/b"\n[data]\nname = "c"\n[optim]\nlr = 1e-5\n')
    result = CliRunner().invoke(cli, ["config", "check", "sft.toml"])
    message = " ".join(str(result.exception).split())
    assert 'kind = "sft", in which model is model; data is train_datasets; optim is optimizer_config.' in message


def test_scripts_of_openrlhf_are_named(folder: Path) -> None:
    assert len(OTHERS["OpenRLHF"]) >= 12
    for number, words in enumerate(OTHERS["OpenRLHF"].values()):
        script = folder / f"{number}.sh"
        script.write_text(f"python3 -m {words[0]} " + " ".join(f"--{word} 1" for word in words[1:]) + "\n")
        with pytest.raises(ConfigError, match="this is an OpenRLHF script, which skyrl does not convert"):
            refuse_other_sources(script.name, "verl")


def test_our_own_files_are_no_other_programs() -> None:
    for kind in KINDS:
        names = [field.name for field in attrs.fields(root_of(kind))]
        refuse_other_tables("run.toml", dict.fromkeys([*names, "extends", "kind"]))


@pytest.mark.parametrize("words", [["--lr", "1e-5"], ["--lr=1e-5"]])
@pytest.mark.parametrize("command", [["run"], ["config", "check"]])
def test_a_field_that_is_given_as_an_option_is_shown_as_an_argument(command: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "run.toml", *words])
    assert result.exit_code == 2
    assert "no such option: --lr. Fields are set as PATH=VALUE: trainer." in result.stderr
    assert "policy.optimizer_config.lr=1e-5" in result.stderr


def test_a_path_and_its_value_in_two_words_are_one_mistake(folder: Path) -> None:
    (folder / "run.toml").write_text("[trainer]\nepochs = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(["run.toml", "trainer.epochs", "2"])
    [problem] = caught.value.problems
    assert (problem.path, problem.hint) == ("trainer.epochs", "write the value without a space: trainer.epochs=2")
    with pytest.raises(ConfigError, match="trainer.epochs=VALUE"):
        load(["trainer.epochs"])


def test_overrides_among_the_files_are_sent_to_the_second_argument(folder: Path) -> None:
    (folder / "run.toml").write_text("[trainer]\nepochs = 1\n")
    overrides = ["trainer.epochs=2", "trainer.logger+=console", "kind=rl"]
    with pytest.raises(ConfigError) as caught:
        load(["run.toml", *overrides])
    assert [problem.hint for problem in caught.value.problems] == [
        f"this is an override: overrides are the second argument, as in compose(FILES, [{word!r}])"
        for word in overrides
    ]


@pytest.mark.parametrize("program", ["verl", "areal", "trl"])
def test_a_file_of_our_own_is_not_converted(program: str) -> None:
    tables = {"trainer": {"epochs": 1}, "generator": {"n_samples_per_prompt": 4}}
    with pytest.raises(ConfigError, match="is a configuration of skyrl's own already"):
        refuse_other_tables("run.toml", tables, of=program)
    refuse_other_tables("run.yaml", {"trainer": {"epochs": 1, "total_epochs": 1}}, of=program)  # one of theirs
    refuse_other_tables("run.yaml", {"trainer": None}, of=program)
