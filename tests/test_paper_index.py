"""The paper index names functions and settings that exist, and every built-in loss and estimator."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from skyrl.config import load
from skyrl.config.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

INDEX = (Path(__file__).parents[1] / "docs" / "paper_index.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in INDEX.splitlines() if line.startswith("| ")]
METHODS = [row for row in ROWS if row[0].strip() != "method"]
OF_NO_PAPER = {"importance_sampling", "cross_entropy", "rollout_is"}
"""The plain policy gradient, imitation, and IcePop in one term, which the index has as a correction."""


def settings(row: list[str]) -> list[str]:
    """As overrides, with whole paths."""
    written = re.findall(r"`([^`]+)`", row[3])
    return [one if one.startswith(("trainer.", "generator.")) else f"trainer.algorithm.{one}" for one in written]


def test_there_is_something_in_it() -> None:
    assert len(METHODS) > 20


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row[0])
def test_a_method_names_a_function_and_settings_that_exist(row: list[str]) -> None:
    module, _, name = row[2].strip("`").rpartition(".")
    assert getattr(importlib.import_module(module), name).__doc__
    assert re.search(r"\]\(https?://", row[1])
    assert load([], settings(row)).config
    assert settings(row)


def test_every_loss_and_estimator_has_its_paper() -> None:
    named = {setting.partition("=")[2] for row in METHODS for setting in settings(row)}
    assert set(ADVANTAGE_ESTIMATORS) <= named
    assert set(POLICY_LOSSES) - OF_NO_PAPER <= named
