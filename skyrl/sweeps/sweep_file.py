"""A sweep: one run repeated with different values (docs/sweeps.md).

`load_sweep` reads the file of `skyrl sweep`, and `points_of` lists the values of each run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, Literal

from attrs import evolve

from skyrl.config.checks.texts import refused_file_name
from skyrl.config.foundation.entry import BaseConfig
from skyrl.errors import ConfigError, Problem
from skyrl.tree import FrozenDict, field, frozen
from skyrl.tree.builder import TreeBuilder
from skyrl.tree.files import read_file
from skyrl.tree.types import display_value
from skyrl.tree.validators import non_negative, not_empty, positive

KINDS_OF_DRAWS = ("uniform", "log_uniform", "integer", "choice")


@frozen
class RandomConfig(BaseConfig):
    """Values drawn at random."""

    draws: int = field(default=0, validator=non_negative)
    """Number of points that are drawn. Raising it later adds points and keeps those that were drawn before."""

    seed: int = 0
    """Seed of the draws. Each value depends only on the seed, its path and the number of its draw."""

    values: Mapping[str, Any] = FrozenDict()
    """Path -> how to draw it: `{uniform = [low, high]}`, `{log_uniform = [low, high]}`, `{integer = [low, high]}` (both
    included) or `{choice = [...]}`."""

    def own_problems(self) -> Iterator[Problem]:
        if bool(self.draws) != bool(self.values):
            yield Problem(path="draws", message=f"{self.draws} draws of {len(self.values)} values", hint="give both")
        for path, draw in flat(self.values, is_leaf=_is_draw):
            if problem := _wrong_draw(draw):
                yield Problem(path=f"values.{path}", message=problem, hint="such as {log_uniform = [1e-6, 1e-4]}")


@frozen
class SweepConfig(BaseConfig):
    """Runs that differ in some values: each of `points`, with each of the random draws, each combination of `grid`, and
    each of `seeds`.
    """

    name: str = field(default="sweep", validator=not_empty)
    """Name of the sweep, of its runs' trackers, and of its folder."""

    run: tuple[str, ...] = ()
    """Files of the run, as arguments of `skyrl run`; paths are relative to the folder of the command."""

    set: Mapping[str, Any] = FrozenDict()
    """Path -> value, for all runs."""

    grid: Mapping[str, Any] = FrozenDict()
    """Path -> list of values: every combination is a run."""

    points: tuple[Mapping[str, Any], ...] = ()
    """Values that belong together: a table of path -> value for each run."""

    random: RandomConfig = RandomConfig()
    """Values drawn at random."""

    seeds: tuple[int, ...] = ()
    """Seeds that each combination is run with. Empty: the seed of the run."""

    at_once: int = field(default=1, validator=positive)
    """Maximum number of runs at the same time."""

    metric: str = "eval/all/avg_score"
    """Metric that runs are compared by, at its best evaluation."""

    goal: Literal["max", "min"] = "max"
    """Whether larger or smaller values of the metric are better."""

    folder: str | None = None
    """Folder of the sweep. None: `sweeps/NAME`."""

    def own_problems(self) -> Iterator[Problem]:
        for field_name, text in (("name", self.name), ("folder", self.folder or "")):
            if refusal := refused_file_name(text):
                yield Problem(path=field_name, message=refusal, hint="choose a shorter one")
        if not self.run:
            yield Problem(path="run", message="no configuration file is given", hint='such as run = ["run.toml"]')
        for path, values in flat(self.grid):
            if not isinstance(values, tuple) or not values:
                message = f"{display_value(values)} is not a list of values"
                yield Problem(path=f"grid.{path}", message=message, hint="write it in [ ]")
        for problem in self.random.own_problems():
            yield evolve(problem, path=f"random.{problem.path}")


def load_sweep(file: str) -> SweepConfig:
    """The sweep that a TOML, YAML or JSON file describes. Raises `ConfigError` with every problem."""
    builder: TreeBuilder[Any] = TreeBuilder(SweepConfig())
    builder.assign_all(read_file(file))
    sweep: SweepConfig = builder.build()
    problems = [evolve(problem, severity="error") for problem in builder.problems] or [*sweep.own_problems()]
    if problems:
        raise ConfigError(problems, title="This sweep cannot be used")
    return sweep


def flat(
    tables: Mapping[str, Any], prefix: str = "", *, is_leaf: Callable[[Mapping[str, Any]], bool] = lambda value: False
) -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of nested tables; `"a.b" = 1` and `a.b = 1` are the same."""
    for name, value in tables.items():
        if isinstance(value, Mapping) and value and not is_leaf(value):
            yield from flat(value, f"{prefix}{name}.", is_leaf=is_leaf)
        else:
            yield prefix + name, value


def draws_of(random: RandomConfig) -> dict[str, Mapping[str, Any]]:
    """Path -> distribution that its value is drawn from."""
    return dict(flat(random.values, is_leaf=_is_draw))


def _is_draw(value: Mapping[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)) in KINDS_OF_DRAWS


def _wrong_draw(draw: object) -> str:
    """Reason why `draw` does not describe a way to draw a value; empty if it does."""
    if not isinstance(draw, Mapping) or not _is_draw(draw):
        return f"is none of: {', '.join(KINDS_OF_DRAWS)}"
    [(kind, values)] = draw.items()
    if not isinstance(values, tuple) or not values:
        return f"{kind} needs a list"
    if kind == "choice":
        return ""
    numbers = [value for value in values if isinstance(value, int if kind == "integer" else (int, float))]
    if len(values) != 2 or len(numbers) != 2 or not numbers[0] <= numbers[1]:
        return f"{kind} needs [low, high], not {list(values)}"
    return "log_uniform needs positive bounds" if kind == "log_uniform" and numbers[0] <= 0 else ""


Point = dict[str, Any]
"""Values of one run: dotted path -> value."""


def points_of(sweep: SweepConfig, seed_field: str) -> Iterator[Point]:
    """Every combination of `points`, `random`, `grid` and `seeds`, the seeds innermost; for the same path, the later
    part wins.
    """
    listed = [dict(flat(point)) for point in sweep.points] or [{}]
    draws = draws_of(sweep.random).items()
    drawn = [
        {path: _random_value(draw, sweep.random.seed, path, number) for path, draw in draws}
        for number in range(sweep.random.draws)
    ] or [{}]
    grid = dict(flat(sweep.grid))
    combined = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    seeds: list[Point] = [{seed_field: seed} for seed in sweep.seeds] or [{}]
    for parts in itertools.product(listed, drawn, combined, seeds):
        yield {path: value for part in parts for path, value in part.items()}


def _random_value(draw: Mapping[str, Any], seed: int, path: str, number: int) -> object:
    """A random value that depends only on the four arguments. Floats are rounded to six significant digits."""
    source = Random(f"{seed}/{path}/{number}")
    [(kind, values)] = draw.items()
    if kind == "choice":
        return source.choice(values)
    low, high = values
    if kind == "integer":
        return source.randint(low, high)
    if kind == "log_uniform":
        return float(f"{math.exp(source.uniform(math.log(low), math.log(high))):.6g}")
    return float(f"{source.uniform(low, high):.6g}")
