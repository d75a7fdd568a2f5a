"""No field does nothing: a component reads it in some run, or the table of what is not implemented yet has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from skyrl.config import SkyRLTrainConfig
from skyrl.config.not_yet import NOT_YET, paths_not_read
from skyrl.experiments.ppo import BasePPOExp
from skyrl.tree.classes import is_config, leaf_paths
from tests.nano_run import config

TABLE = 292
"""Leaves in the table. This number may only fall."""

SCENARIOS: tuple[dict[str, Any], ...] = (
    {"trainer__recompute_activations": True, "trainer__hf_save_interval": 2, "trainer__max_training_steps": 2},
    {"trainer__resume_mode": "from_path", "trainer__max_training_steps": 3},
)
"""Runs that together use everything this version does."""

DECIDED_BY_RULES = {
    "trainer.bf16": "trainer.compute_dtype",
    "trainer.flash_attn": "trainer.attention",
    "trainer.gradient_checkpointing": "trainer.recompute_activations",
}
"""Fields that a derivation rule turns into the one that components read."""


@contextmanager
def recorded(run: SkyRLTrainConfig) -> Iterator[set[str]]:
    """The dotted paths of `run` that code of skyrl outside the configuration rooms reads inside the block."""
    tables = {id(table): path for path, table in tables_of(run, "")}
    reads: set[str] = set()
    classes = {type(table) for _, table in tables_of(run, "")}
    for cls in classes:
        cls.__getattribute__ = recorder(tables, reads)
    try:
        yield reads
    finally:
        for cls in classes:
            del cls.__getattribute__


def recorder(tables: dict[int, str], reads: set[str]) -> Any:
    def read(self: Any, name: str) -> Any:
        module = sys._getframe(1).f_globals.get("__name__", "")
        if id(self) in tables and module.startswith("skyrl.") and not module.startswith(("skyrl.config", "skyrl.tree")):
            reads.add(f"{tables[id(self)]}{name}")
        return object.__getattribute__(self, name)

    return read


def tables_of(table: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix, table
    for attribute in attrs.fields(type(table)):
        value = getattr(table, attribute.name)
        if is_config(type(value)):
            yield from tables_of(value, f"{prefix}{attribute.name}.")


def separate(table: Any) -> Any:
    """A copy in which no two paths share an instance, so that a read tells which path it was."""
    values = {each.name: getattr(table, each.name) for each in attrs.fields(type(table))}
    return type(table)(**{name: separate(value) if is_config(type(value)) else value for name, value in values.items()})


@pytest.fixture(scope="module")
def read_paths(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("reads")
    seen: set[str] = set()
    for scenario in SCENARIOS:
        extra = (
            {"trainer__resume_path": str(out / "checkpoints" / "global_step_2")}
            if "trainer__resume_mode" in scenario
            else {}
        )
        run = separate(config(nano, out, **{"trainer__algorithm__use_kl_loss": True, **scenario, **extra}))
        with recorded(run) as reads:
            BasePPOExp(run).run()
        seen |= reads
    return seen


def test_every_field_is_read_by_a_component_or_listed_as_not_implemented(read_paths: set[str]) -> None:
    listed = set(paths_not_read())
    unread = {path for path, _ in leaf_paths(SkyRLTrainConfig)} - read_paths - listed - set(DECIDED_BY_RULES)
    assert not unread
    print(f"{len(listed)} fields are not implemented yet")
    assert len(listed) == TABLE


def test_nothing_that_is_read_is_still_listed(read_paths: set[str]) -> None:
    exact = {entry.path for entry in NOT_YET}
    assert not {path for path in read_paths if path in exact} - HANDED_ON


HANDED_ON = {
    "trainer.policy.model.lora",  # to the generator and the client, whose signatures have it
    "generator.sampling_params.additional_kwargs",  # looked at by the engine, to refuse them
    "generator.eval_sampling_params.additional_kwargs",
}
"""Listed fields that a component sees without doing what they ask for."""
