"""Every door of the configuration takes anything: what is not accepted ends in an exception of ours.

Inputs are generated from one seed: files in the three languages, arguments, and valid trees with one leaf changed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from property_tests.trees import LEAVES, RUNNABLE, as_arguments, as_tables
from skyrl.cli.config import config
from skyrl.config import SkyRLTrainConfig, check, compose, load, resolve
from skyrl.errors import SkyRLError
from skyrl.tree import get_at
from skyrl.tree.classes import table_paths
from skyrl.tree.dump import stored_value

PATHS = sorted([*LEAVES, *table_paths(SkyRLTrainConfig)])
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**63, 10**400, 0.5, -0.0, 1e308, "", "none", "env:NOBODY", "env:HOME", "@x", "***",
    "1 epoch", "5 parsecs", "10m", "\u0663", "x" * 400, "a.b:C", "gone.py:f", "../..", "~nobody/x", "{}", "[1",
    "\x00", "é",
    [], {}, [[]], [None], {"class": "x:Y"}, {"a": {"b": []}}, [1, "a"], {"": 1}, {"x.y": 1},
)  # fmt: skip
TEXTS = (
    "[",
    "{",
    "a = ",
    "a: b: c",
    '{"a": 1, "a": 2}',
    "a = 1\na = 2",
    "\ufeff",
    "- 1",
    "&a [*a]",
    "<<: 1",
    "extends = 'run.toml'",
)


def test_a_thousand_inputs_at_every_door_raise_nothing_but_our_own(tmp_path: Path) -> None:
    accepted, refused = knock(1_000, seed=1, folder=tmp_path)
    assert accepted > 50
    assert refused > 500


@pytest.mark.long
def test_a_hundred_thousand_inputs_at_every_door_raise_nothing_but_our_own(tmp_path: Path) -> None:
    accepted, refused = knock(100_000, seed=2, folder=tmp_path)
    print(f"{accepted} accepted, {refused} refused")
    assert min(accepted, refused) > 5_000


def knock(count: int, seed: int, folder: Path) -> tuple[int, int]:
    """How many of `count` generated inputs were accepted, and how many refused; anything else is raised."""
    chance = random.Random(seed)
    accepted = 0
    for _ in range(count):
        files, overrides = given(chance, folder)
        try:
            chance.choice(DOORS)(files, overrides, chance)
            accepted += 1
        except SkyRLError as error:
            print(error)  # it can be rendered
    return accepted, count - accepted


def given(chance: random.Random, folder: Path) -> tuple[list[str], Any]:
    """Files and overrides: a valid tree with one leaf changed, arguments, or a text that is hardly a file."""
    values: dict[str, Any] = {**RUNNABLE, "trainer.policy.model.path": "m"}
    values[changed_path(chance)] = chance.choice(SCALARS)
    kind = chance.randrange(4)
    if kind == 0:
        return [], values
    if kind == 1:
        return [], as_arguments(values)
    file = folder / f"run.{chance.choice(('json', 'yaml', 'toml'))}"
    if kind == 2:
        text = chance.choice(TEXTS) * chance.randrange(1, 4)
    else:
        text = json.dumps(as_tables_if_possible(values))
        file = file.with_suffix(chance.choice((".json", ".yaml")))
    file.write_text(text, encoding="utf-8", errors="replace")
    return [str(file)], ["~" + changed_path(chance)] if chance.random() < 0.1 else []


def changed_path(chance: random.Random) -> str:
    """A path of the tree, now and then with a slip or a name below it."""
    path = chance.choice(PATHS)
    return chance.choice((path, path, path, path, path + ".x", path[:-1], path + "0"))


def as_tables_if_possible(values: dict[str, Any]) -> dict[str, Any]:
    """Nested tables; where one path leads through another's value, dotted keys."""
    try:
        return as_tables(values)
    except (AttributeError, TypeError):
        return values


def by_compose(files: list[str], overrides: Any, chance: random.Random) -> None:
    compose(files, overrides, strict=chance.random() < 0.5)


def by_load(files: list[str], overrides: Any, chance: random.Random) -> None:
    loaded = load(files, overrides, environ={})
    run = resolve(loaded)
    check(run, loaded.origins)
    assert stored_value(get_at(run, "trainer.seed")) is not None


def by_structure(files: list[str], overrides: Any, chance: random.Random) -> None:
    if isinstance(overrides, dict):
        SkyRLTrainConfig.from_dict_config(as_tables_if_possible(overrides))
    else:
        by_load(files, overrides, chance)


def by_command(files: list[str], overrides: Any, chance: random.Random) -> None:
    """`skyrl config show | explain | check | diff`, in this process."""
    words = [*files, *(overrides if isinstance(overrides, list) else [])]
    command = chance.choice(("show", "explain", "check", "diff", "docs"))
    if command == "diff":
        words = [*(files or ["preset:dapo"]), "preset:dapo"]
    elif command == "explain":
        words = [chance.choice(PATHS), *words]
    result = CliRunner().invoke(config, [command, *words])
    if isinstance(result.exception, Exception):
        raise result.exception


Door = Callable[[list[str], Any, random.Random], None]
DOORS: tuple[Door, ...] = (*[by_compose] * 8, *[by_load] * 4, *[by_structure] * 7, by_command)
