from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from skyrl.config import PreferenceConfig, RewardModelConfig, SFTConfig, SkyRLTrainConfig
from skyrl.tree import to_dict
from skyrl.tree.schema import json_schema

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    return Draft202012Validator(json_schema(SkyRLTrainConfig))


STORED = {
    "skyrl.schema.json": SkyRLTrainConfig,
    "skyrl.sft.schema.json": SFTConfig,
    "skyrl.reward_model.schema.json": RewardModelConfig,
    "skyrl.preference.schema.json": PreferenceConfig,
}


@pytest.mark.parametrize("name", STORED)
def test_the_stored_schemas_are_those_of_the_classes(name: str) -> None:
    stored = json.loads((ROOT / "schemas" / name).read_text(encoding="utf-8"))
    assert stored == json_schema(STORED[name]), "run make schemas"


def test_the_target_that_writes_schemas_writes_each_of_them() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nschemas:")[2].partition("\n\n")[0]
    kinds = re.search(r"for kind in ([a-z_ ]+);", recipe)
    assert kinds is not None and "skyrl.$$kind.schema.json" in recipe
    assert {"skyrl.schema.json", *(f"skyrl.{kind}.schema.json" for kind in kinds[1].split())} == set(STORED)


@pytest.mark.parametrize("block", [0, 1])
def test_the_examples_of_supervised_runs_are_valid(block: int) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "sft.md").read_text(encoding="utf-8"), re.DOTALL)
    run = tomllib.loads(blocks[block])
    config_class = {"sft": SFTConfig, "reward_model": RewardModelConfig}[run["kind"]]
    validator = Draft202012Validator(json_schema(config_class))
    validator.validate(run)
    assert list(validator.iter_errors({**run, "batchsize": 3}))


def test_the_schema_is_a_valid_one() -> None:
    Draft202012Validator.check_schema(json_schema(SkyRLTrainConfig))


def test_the_default_tree_and_the_quick_start_are_valid(schema: Draft202012Validator) -> None:
    schema.validate(to_dict(SkyRLTrainConfig()))
    schema.validate(tomllib.loads((ROOT / "examples/quickstart/grpo.toml").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "wrong",
    [
        {"trainer": {"epoch": 2}},
        {"trainer": {"epochs": "two"}},
        {"trainer": {"strategy": "fsdp3"}},
        {"data": {"train_data": [5]}},
        {"data": {"train_weights": 1.0}},
    ],
)
def test_what_the_loader_refuses_an_editor_marks_too(schema: Draft202012Validator, wrong: dict[str, Any]) -> None:
    assert not schema.is_valid(wrong)


@pytest.mark.parametrize(
    ("table", "name"),
    [("trainer", "epochs"), ("trainer", "strategy"), ("trainer", "bf16"), ("trainer", "max_training_steps"),
     ("generator", "rope_theta"), ("data", "train_data"), ("trainer", "run_name"), ("trainer", "ckpt_interval")],
)  # fmt: skip
def test_every_field_takes_a_reference_to_the_environment(schema: Draft202012Validator, table: str, name: str) -> None:
    assert schema.is_valid({table: {name: "env:NAME"}})
    if name not in ("run_name", "ckpt_interval", "train_data"):  # those take text
        assert not schema.is_valid({table: {name: "env:1"}})


def test_null_is_written_none_in_toml(schema: Draft202012Validator) -> None:
    assert schema.is_valid({"generator": {"eval_sampling_params": "none"}})


NAMED = {
    "trainer.algorithm.advantage_estimator": ("grpo", "gpg"),
    "trainer.algorithm.policy_loss_type": ("regular", "cispo"),
    "environment.env_class": ("gsm8k", "text2sql"),
}


@pytest.mark.parametrize("path", NAMED)
def test_names_are_suggested_and_misspelled_ones_are_marked(schema: Draft202012Validator, path: str) -> None:
    def run(value: object) -> object:
        for name in reversed(path.split(".")):
            value = {name: value}
        return value

    for right in (*NAMED[path], "my_package.module:Mine", "file.py:Mine", "env:NAME"):
        assert schema.is_valid(run(right)), right
        assert schema.is_valid(run([right])) == (path == "environment.env_class")
    for wrong in (f"{NAMED[path][0]}p", "", 3):
        assert not schema.is_valid(run(wrong)), wrong
