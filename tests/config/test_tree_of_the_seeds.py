"""Every field of the seeds' tree is in ours, under its name, with its type and its default.

The seeds are versions of SkyRL, whose configuration skyrl reads.

The facts are in `skyrl_config_fields.json` (see `--reference`).
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from skyrl.config import SkyRLTrainConfig
from skyrl.tree import get_at, thaw
from skyrl.tree.classes import fields_of
from skyrl.tree.types import bare, config_class

WIDER = {
    "lora.target_modules": {"List[str]"},  # names, as PEFT takes them
    "lora.exclude_modules": {"List[str]"},
    "trainer.logger": {"List[str]"},  # real scripts write ['console','wandb']
    "trainer.algorithm.value_clip": {"None"},  # no clipping
    "trainer.eval_interval": {"str", "List[int]", "List[str]"},  # "1 epoch", "30m", and several
    "trainer.ckpt_interval": {"str", "List[int]", "List[str]"},
    "trainer.hf_save_interval": {"str", "List[int]", "List[str]"},
    "environment.env_class": {"None", "List[str]"},  # null: every row names its own; several rewards
}
"""What some fields of ours take beyond the seeds' type, by the end of their path."""

CORRECTED = {
    "trainer.algorithm.cispo.cispo_eps_clip_low": 1.0,  # the bounds 0 and 5 of ScaleRL, as distances from 1
    "trainer.algorithm.cispo.cispo_eps_clip_high": 4.0,
    "generator.inference_engine.enforce_eager": False,
}
"""Defaults that SkyRL itself has corrected since, as in `skyrl_later_changes.json`."""


@pytest.fixture(scope="module")
def facts(reference: Path) -> dict[str, Any]:
    """The reference file: `fields`, and `constructed_defaults` after derivation."""
    loaded: dict[str, Any] = json.loads((reference / "skyrl_config_fields.json").read_text())
    return loaded


def owner_of(path: str) -> tuple[type[Any], str]:
    """The class that declares the last name of a path, and that name. Raises KeyError for an unknown one."""
    cls: type[Any] = SkyRLTrainConfig
    *tables, name = path.split(".")
    for table in tables:
        nested = config_class(fields_of(cls)[table].type)
        assert nested is not None, f"{table} of {path} is not a table"
        cls = nested
    return cls, name


def arms_of_ours(kind: Any) -> set[str]:
    """Our type in the seeds' spelling: a closed set of text is `str`, a tuple is `List`, a Mapping is `dict`."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return set().union(*(arms_of_ours(arm) for arm in get_args(kind)))
    if origin is Literal:
        return {type(member).__name__ for member in get_args(kind)}
    if origin is tuple:
        return {f"List[{item}]" for item in arms_of_ours(get_args(kind)[0])}
    if origin is Mapping:
        return {"dict"}
    return {"None" if kind is type(None) else kind.__name__}


def arms_of_theirs(spelling: str) -> set[str]:
    """The same of a type as the seeds spell it: `Optional[List[str]]` is {List[str], None}."""
    if match := re.fullmatch(r"Optional\[(.*)\]", spelling):
        return arms_of_theirs(match[1]) | {"None"}
    if match := re.fullmatch(r"Union\[(.*)\]", spelling):
        return set().union(*(arms_of_theirs(arm) for arm in match[1].split(", ")))
    if spelling.startswith("Dict["):
        return {"dict"}
    return {spelling if spelling.startswith("List[") else spelling.rpartition(".")[2]}


def test_every_field_has_its_type(facts: dict[str, Any]) -> None:
    different = {}
    for path, fact in facts["fields"].items():
        cls, name = owner_of(path)
        ours, seed_arms = arms_of_ours(bare(fields_of(cls)[name].type)), arms_of_theirs(fact["type"])
        wider = next((arms for end, arms in WIDER.items() if path.endswith(end)), set())
        if ours != seed_arms | wider:
            different[path] = (ours, seed_arms)
    assert different == {}


def test_every_field_has_its_default(facts: dict[str, Any]) -> None:
    different = {}
    for path, fact in facts["fields"].items():
        cls, name = owner_of(path)
        ours = thaw(getattr(cls(), name))
        if fact["default"] == "<object>":
            ours = "<object>" if config_class(fields_of(cls)[name].type) else ours
        if path not in CORRECTED and json.dumps(ours) != json.dumps(fact["default"]):  # as text, so that 1 is not 1.0
            different[path] = (ours, fact["default"])
    assert different == {}


def test_the_default_tree_holds_what_the_seeds_construct_or_leaves_it_to_derivation(facts: dict[str, Any]) -> None:
    default = SkyRLTrainConfig()
    ours = {path: thaw(get_at(default, path)) for path in facts["constructed_defaults"]}
    different = {
        path: (ours[path], seed_default)
        for path, seed_default in facts["constructed_defaults"].items()
        if ours[path] is not None and json.dumps(ours[path]) != json.dumps(seed_default)
    }
    assert different.keys() == CORRECTED.keys()


def test_a_default_that_skyrl_has_corrected_is_the_corrected_one(reference: Path) -> None:
    later = json.loads((reference / "skyrl_later_changes.json").read_text())["changed"]
    default = SkyRLTrainConfig()
    assert {path: later[path][1] for path in CORRECTED} == CORRECTED
    assert {path: get_at(default, path) for path in CORRECTED} == CORRECTED


def test_some_defaults_belong_to_the_instance_and_not_to_the_class() -> None:
    trainer = SkyRLTrainConfig().trainer
    assert trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (trainer.critic.model.path, trainer.ref.model.path) == (None, None)
    assert (trainer.policy.optimizer_config.lr, trainer.critic.optimizer_config.lr) == (1e-6, 5e-6)
