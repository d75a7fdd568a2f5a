"""Trackers of AReaL's `stats_logger` and of SkyRL's SFT scripts become `logger` and `trackers`."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.report import Conversion, Line
from skyrl.interop.skyrl.scripts import convert_overrides

SFT = {"model.path": "a/b", "train_dataset.type": "sft", "train_dataset.path": "rows.jsonl"}
WANDB = {
    "experiment_name": "gsm8k",
    "trial_name": "first",
    "stats_logger.experiment_name": "gsm8k",
    "stats_logger.wandb.mode": "offline",
    "stats_logger.wandb.wandb_base_url": "http://127.0.0.1:8080",
    "stats_logger.wandb.entity": "team",
    "stats_logger.wandb.job_type": "train",
    "stats_logger.wandb.group": "seeds",
    "stats_logger.wandb.notes": "why",
    "stats_logger.wandb.tags": ["a", "b"],
    "stats_logger.wandb.config": None,
    "stats_logger.wandb.id_suffix": "train",
}
TRACKERS = {
    "job_type": "train",
    "group": "seeds",
    "notes": "why",
    "tags": ["a", "b"],
    "wandb": {"mode": "offline", "base_url": "http://127.0.0.1:8080", "entity": "team"},
}


def refused(conversion: Conversion) -> list[Line]:
    return [line for line in conversion.lines if line.is_refused]


@pytest.mark.parametrize("rest", [{}, SFT])
def test_each_setting_of_wandb_has_its_place_in_every_kind_of_run(rest: dict[str, Any]) -> None:
    conversion = convert_keys({**rest, **WANDB})
    table = conversion.tables if rest else conversion.tables["trainer"]
    assert (table["project_name"], table["run_name"]) == ("gsm8k", "first")
    assert (table["logger"], table["trackers"]) == (["console", "wandb"], TRACKERS)
    assert refused(conversion) == []


def test_several_trackers_convert_to_one_list() -> None:
    keys = {
        "stats_logger.wandb.mode": "shared",
        "stats_logger.swanlab.mode": "cloud",
        "stats_logger.swanlab.logdir": "logs/swan",
        "stats_logger.tensorboard.path": "logs/tb",
    }
    trainer = convert_keys(keys).tables["trainer"]
    assert trainer["logger"] == ["console", "wandb", "swanlab", "tensorboard"]
    modes = {"wandb": {"mode": "online"}, "swanlab": {"mode": "online", "path": "logs/swan"}}
    assert trainer["trackers"] == modes | {"tensorboard": {"path": "logs/tb"}}


def test_the_tables_of_areals_older_system_stand_at_the_top() -> None:
    trainer = convert_keys({"wandb.mode": "online", "wandb.entity": "team"}).tables["trainer"]
    assert trainer["trackers"]["wandb"] == {"mode": "online", "entity": "team"}


def test_without_a_service_metrics_go_to_the_console() -> None:
    off = {"stats_logger.wandb.mode": "disabled", "stats_logger.swanlab.mode": "disabled"}
    assert convert_keys(off).tables["trainer"]["logger"] == "console"  # where the default would be W&B
    assert "logger" not in convert_keys({**SFT, **off}).tables


@pytest.mark.parametrize(
    ("key", "value", "outcome", "reason"),
    [
        ("wandb.wandb_api_key", "0123456789", "refused", "set the environment variable WANDB_API_KEY"),
        ("swanlab.api_key", "0123456789", "needless", "swanlab is off"),
        ("swanlab.mode", "local", "renamed", "files that can be synced"),
        ("trackio.mode", "online", "not yet", "Trackio"),
        ("wandb.config", {"a": 1}, "not yet", "tracker settings beyond"),
        ("wandb.project", "gsm8k", "renamed", ""),
        ("wandb.project", "other", "not yet", "project_name = 'gsm8k' applies to all"),
        ("wandb.id_suffix", "eval", "needless", "stored in its folder"),
    ],
)
def test_one_setting_converts_to_the_expected_outcome(key: str, value: Any, outcome: str, reason: str) -> None:
    name = f"stats_logger.{key}"
    conversion = convert_keys({**WANDB, name: value})
    [line] = [line for line in conversion.lines if line.source == name]
    assert (line.outcome, reason in line.reason) == (outcome, True), line
    assert "0123456789" not in str(conversion.report())
    assert not line.is_refused or not line.changes_training


def test_a_script_of_skyrls_main_sft_keeps_its_trackers_and_their_tags() -> None:
    words = ["strategy=fsdp", "model.path=a/b", "train_datasets=['c/d']", "logger=wandb", "tags=['x']"]
    conversion = convert_overrides([*words, "project_name=p", "run_name=r"])
    assert refused(conversion) == []
    settings = {name: conversion.tables[name] for name in ("logger", "trackers", "project_name", "run_name")}
    assert settings == {"logger": "wandb", "trackers": {"tags": ["x"]}, "project_name": "p", "run_name": "r"}
