"""Generated inputs, and every door of the configuration that they are given to.

Inputs come from one seed: files in the three languages, scripts and files of other projects, arguments, and valid trees
with one leaf changed, to a value that the leaf takes or to one that it may refuse. A door is a function or a command
that takes a configuration; it accepts the input, raises `SkyRLError`, or has a defect.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import cattrs
import click
from attrs import Factory, define
from click.testing import CliRunner

from property_tests.trees import LEAVES, RUNNABLE, SIMPLE, as_arguments, as_tables, default_of, takes
from skyrl.cli.main import cli
from skyrl.config import SkyRLTrainConfig, check, compose, load, resolve
from skyrl.config.derive.run_kind import RunKind
from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.errors import SkyRLError
from skyrl.tree import evolve_at, get_at
from skyrl.tree.classes import table_paths
from skyrl.tree.dump import stored_value

PATHS = sorted([*LEAVES, *table_paths(SkyRLTrainConfig)])
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**63, 10**400, 0.5, -0.0, 1e308, "", "none", "env:NOBODY", "env:HOME", "@x", "***",
    "1 epoch", "5 parsecs", "10m", "\u0663", "x" * 400, "a.b:C", "gone.py:f", "../..", "~nobody/x", "{}", "[1",
    "\x00", "é", "${a.b}", "$((1+", "\ud800",
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
    "python -m skyrl_train.entrypoints.main_base trainer.epochs=$((1 + \\\n",
    "actor:\n  backend: fsdp:d1p1t1\n",
    "for x in 1 2; do\n",
    "'" * 3,
)
FOREIGN = (
    "actor.path", "actor.optimizer.lr", "actor.group_size", "actor.ppo_n_minibatches", "allocation_mode",
    "cluster.n_nodes", "cluster.fileroot", "gconfig.n_samples", "gconfig.temperature", "rollout.max_head_offpolicyness",
    "train_dataset.path", "train_dataset.batch_size", "total_train_epochs", "seed", "saver.freq_epochs", "kl_ctl",
    "ref.path", "actor.backend", "rollout.backend", "async_training", "recover.mode",
)  # fmt: skip
"""Settings of AReaL's files."""

Files = list[str]
Given = tuple[Files, Any]
Door = Callable[[Files, Any, random.Random], None]


@define
class Knocks:
    """What came of a number of inputs."""

    accepted: Counter[str] = Factory(Counter)
    """Inputs accepted by each door."""
    refused: Counter[str] = Factory(Counter)
    slowest: tuple[float, str] = (0.0, "")
    """CPU seconds of the slowest input, and the door with the number of the input."""

    def note(self, entry_point: str, number: int, seconds: float, *, accepted: bool) -> None:
        (self.accepted if accepted else self.refused)[entry_point] += 1
        self.slowest = max(self.slowest, (seconds, f"{entry_point}, input {number}"))


def knock(count: int, seed: int, folder: Path) -> Knocks:
    """Give each of `count` generated inputs to one door. Raises whatever a door raises that is no `SkyRLError`."""
    chance, knocks = random.Random(seed), Knocks()
    with without_training():
        for number in range(count):
            files, overrides = given(chance, folder)
            entry_point, accepted = chance.choice(DOORS), True
            began = time.process_time()
            try:
                entry_point(files, overrides, chance)
            except SkyRLError as error:
                accepted = not str(error)  # it can be rendered, and says something
            except Exception as error:
                error.add_note(
                    f"door {entry_point.__name__}, input {number} of seed {seed}: {files}, {overrides!r:.2000}"
                )
                raise
            knocks.note(entry_point.__name__, number, time.process_time() - began, accepted=accepted)
    return knocks


@contextmanager
def without_training() -> Iterator[None]:
    """`skyrl run` ends, with exit code 0, where it would make the experiment."""
    with mock.patch("skyrl.experiments.experiment.experiment_class", side_effect=SystemExit(0)):
        yield


def given(chance: random.Random, folder: Path) -> Given:
    """Files and overrides: a valid tree with one leaf changed, arguments, or a text that is hardly a file."""
    values: dict[str, Any] = {**RUNNABLE, "trainer.policy.model.path": "m"}
    if chance.random() < 0.1:
        values["kind"] = chance.choice([*KINDS, "other"])
    path = chance.choice(PATHS)
    if chance.random() < 0.5 and path in LEAVES:
        values[path] = chance.choice(valid_values(path))
    else:
        values[with_a_slip(path, chance)] = chance.choice(SCALARS)
    kind = chance.randrange(4)
    if kind == 0:
        return [], values
    if kind == 1:
        return [], as_arguments(values)
    suffix = chance.choice(("json", "yaml", "toml"))
    text = json.dumps(as_tables_if_possible(values))
    if kind == 2:
        suffix, text = chance.choice((suffix, "sh", "")), chance.choice(TEXTS) * chance.randrange(1, 4)
    file = folder / f"run.{'json' if kind == 3 and suffix == 'toml' else suffix}"
    file.write_text(text, encoding="utf-8", errors="replace")
    return [str(file)], ["~" + with_a_slip(path, chance)] if chance.random() < 0.1 else []


@cache
def valid_values(path: str) -> tuple[Any, ...]:
    """Values of several kinds that the leaf takes, its default first."""
    return tuple(value for value in (default_of(LEAVES[path]), *SIMPLE, *SCALARS) if takes(path, value)) or (None,)


def with_a_slip(path: str, chance: random.Random) -> str:
    """The path, now and then with a slip or a name below it."""
    return chance.choice((path, path, path, path, path + ".x", path[:-1], path + "0"))


def as_tables_if_possible(values: dict[str, Any]) -> dict[str, Any]:
    """Nested tables; where one path leads through another's value, dotted keys."""
    try:
        return as_tables(values)
    except (AttributeError, TypeError):
        return values


def by_compose(files: Files, overrides: Any, chance: random.Random) -> None:
    compose(files, overrides, strict=chance.random() < 0.5)


def by_load(files: Files, overrides: Any, chance: random.Random) -> None:
    loaded = load(files, overrides, environ={})
    run = resolve(loaded)
    check(run, loaded.origins)
    assert stored_value(get_at(run, "trainer.seed")) is not None


def by_python(files: Files, overrides: Any, chance: random.Random) -> None:
    """`from_dict_config`, `cattrs.structure` and `evolve_at`, of any kind of run."""
    if not isinstance(overrides, dict):
        return by_load(files, overrides, chance)
    root: Any = root_of(chance.choice([*KINDS]))
    variant = chance.randrange(3)
    if variant == 0:
        root.from_dict_config(as_tables_if_possible(overrides))
    elif variant == 1:
        cattrs.structure(as_tables_if_possible(overrides), root)
    else:
        path, value = chance.choice([*overrides.items()])
        evolve_at(root(), path, value)
    return None


def by_config_command(files: Files, overrides: Any, chance: random.Random) -> None:
    """`skyrl config show | explain | check | diff | docs | schema`."""
    words = [*files, *(overrides if isinstance(overrides, list) else [])]
    command = chance.choice(("show", "explain", "check", "diff", "docs", "schema"))
    if command == "diff":
        words = [*(files or ["preset:dapo"]), "preset:dapo"]
    elif command == "explain":
        words = [with_a_slip(chance.choice(PATHS), chance), *words]
    elif command == "show":
        words += chance.choice(([], ["--sparse"], ["--origins"], ["--derived"], ["--written"], ["--format", "toml"]))
    invoke(["config", command, *words])


def by_convert(files: Files, overrides: Any, chance: random.Random) -> None:
    """`skyrl config convert`, of a file, a script, and settings that other projects have."""
    house = chance.choice(("skyrl-hydra", "skyrl", "areal"))
    if not files:
        file = Path(_scratch(), chance.choice(("foreign.yaml", "foreign.sh", "foreign")))
        settings = {chance.choice(FOREIGN): chance.choice((*SCALARS, *SIMPLE)) for _ in range(3)}
        words = overrides if isinstance(overrides, list) else as_arguments(settings)
        text = "python -m skyrl_train.entrypoints.main_base \\\n  " + " \\\n  ".join(words)
        if file.suffix == ".yaml":
            text = json.dumps(as_tables_if_possible(settings))
        file.write_text(text, encoding="utf-8", errors="replace")
        files = [str(file)]
    output = ["-o", str(Path(_scratch(), "converted.toml"))] if chance.random() < 0.2 else []
    invoke(["config", "convert", files[0], "--from", house, *output])


def by_run(files: Files, overrides: Any, chance: random.Random) -> None:
    """`skyrl run | doctor | plan`, up to where a run would be made; half of them on a machine that has all it takes."""
    words = [*files, *(overrides if isinstance(overrides, list) else as_arguments(overrides))]
    command = chance.choice(("run", "run", "doctor", "plan"))
    if chance.random() < 0.5:
        return invoke([command, *words])
    with mock.patch.object(RunKind, "preflight_checks", return_value=()):
        return invoke([command, *words])


def invoke(words: list[str]) -> None:
    """The command, in this process. Exit code 2 is raised as a refusal, and exceptions as they are."""
    result = CliRunner().invoke(cli, words)
    if isinstance(result.exception, Exception):
        raise result.exception
    if result.exit_code == click.UsageError.exit_code:
        raise SkyRLError(result.output)


@cache
def _scratch() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="doors-")


DOORS: tuple[Door, ...] = (
    *[by_compose] * 6,
    *[by_load] * 4,
    *[by_python] * 5,
    by_config_command,
    *[by_convert] * 3,
    by_run,
)
"""Each as often as it can be afforded."""
