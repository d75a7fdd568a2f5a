"""The paper index names functions and settings that exist, and every built-in loss and estimator."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from skyrl.config import load
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS, EstimatorFacts
from skyrl.config.settings.losses import POLICY_LOSSES, LossFacts

INDEX = (Path(__file__).parents[1] / "docs" / "paper_index.md").read_text(encoding="utf-8")
METHODS_PART = INDEX.partition("## What each loss reads")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in METHODS_PART.splitlines()
    if line.startswith("| ")
]
METHODS = [row for row in ROWS if row[0].strip() != "method"]
OF_NO_PAPER = {"importance_sampling", "cross_entropy", "rollout_is"}
"""The plain policy gradient, imitation, and IcePop in one term, which the index has as a correction."""


def settings(row: list[str]) -> list[str]:
    """As overrides, with whole paths."""
    written = re.findall(r"`([^`]+)`", row[3])
    return [
        name if name.startswith(("trainer.", "generator.", "data.")) else f"trainer.algorithm.{name}"
        for name in written
    ]


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


def yes(fact: bool | None) -> str:
    """As the tables of the index spell it."""
    return "yes" if fact else ""


def fields_of(facts: LossFacts | EstimatorFacts) -> str:
    """Fields of `trainer.algorithm` that it reads, its own table first."""
    own = (facts.table,) if isinstance(facts, LossFacts) and facts.table else ()
    return ", ".join(f"`{name}`" for name in (*own, *facts.fields))


def test_the_index_says_what_each_loss_reads() -> None:
    for name, facts in POLICY_LOSSES.items():
        cells = (
            f"`{name}`",
            fields_of(facts),
            yes(facts.reads_old_logprobs),
            yes(facts.reads_rollout_logprobs),
            yes(facts.expects_sequence_mean),
            yes(facts.takes_corrections),
        )
        assert f"| {' | '.join(cells)} |" in INDEX


def test_the_index_says_what_each_estimator_reads() -> None:
    for name, facts in ADVANTAGE_ESTIMATORS.items():
        cells = (
            f"`{name}`",
            fields_of(facts),
            yes(facts.is_group_relative),
            yes(facts.compares_with_greedy),
            yes(facts.reads_values),
            yes(facts.discounts),
        )
        assert f"| {' | '.join(cells)} |" in INDEX
