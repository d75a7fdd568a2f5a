"""The points of a sweep: the values that each run sets."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.sweeps.sweep_file import SweepConfig, draws_of, flat

Point = dict[str, Any]
"""Values of one run: dotted path -> value."""


def points_of(sweep: SweepConfig, seed_field: str) -> Iterator[Point]:
    """Every combination of `points`, `random`, `grid` and `seeds`, the seeds innermost; for the same path, the later
    part wins.
    """
    listed = [dict(flat(point)) for point in sweep.points] or [{}]
    draws = draws_of(sweep.random).items()
    drawn = [
        {path: _drawn(how, sweep.random.seed, path, number) for path, how in draws}
        for number in range(sweep.random.draws)
    ] or [{}]
    grid = dict(flat(sweep.grid))
    combined = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    seeds: list[Point] = [{seed_field: seed} for seed in sweep.seeds] or [{}]
    for parts in itertools.product(listed, drawn, combined, seeds):
        yield {path: value for part in parts for path, value in part.items()}


def _drawn(how: Mapping[str, Any], seed: int, path: str, number: int) -> object:
    """A random value that depends only on the four arguments. Floats are rounded to six significant digits."""
    source = random.Random(f"{seed}/{path}/{number}")
    [(kind, values)] = how.items()
    if kind == "choice":
        return source.choice(values)
    low, high = values
    if kind == "integer":
        return source.randint(low, high)
    if kind == "log_uniform":
        return float(f"{math.exp(source.uniform(math.log(low), math.log(high))):.6g}")
    return float(f"{source.uniform(low, high):.6g}")
