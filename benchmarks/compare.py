"""What changed in speed between two checkouts on this machine: short benchmarks, in turns.

    make bench-compare REV=v0.2        or: python benchmarks/compare.py OTHER_ROOT [ROUNDS]

Each benchmark runs ROUNDS (3) times with the code of either checkout, one after the other. A line is printed for every
number whose median changed by more than 10 %, and for every benchmark that the other checkout cannot run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
TELLING = 0.1
"""Change of a number from which it is printed."""

SHORT: tuple[tuple[str, ...], ...] = (
    ("grpo_step.py", "--sides", "skyrl", "12", "0"),
    ("generation.py", "--short", "--only", "uniform", "long_prompt"),
    ("training_layouts.py", "tiny"),
    ("driver.py", "--steps", "2", "256"),
    ("sft.py", "--sides", "skyrl"),
)
"""The short form of each benchmark: `make bench` runs the same."""


def main() -> None:
    """Compare the other checkout with this one."""
    other, rounds = Path(sys.argv[1]).absolute(), int((sys.argv[2:] or ["3"])[0])
    for command in SHORT:
        runs = [(numbers(command, other), numbers(command, ROOT)) for _ in range(rounds)]
        before, after = ([pair[side] for pair in runs] for side in (0, 1))
        if not all(before):
            print(f"{command[0]}: the other checkout cannot run it")
            continue
        for name in after[0]:
            report(
                f"{command[0]} {name}", [result.get(name) for result in before], [result.get(name) for result in after]
            )


def report(name: str, before: Sequence[float | None], after: Sequence[float | None]) -> None:
    """Print the change of a number that both sides have, where it is large enough."""
    old, new = ([value for value in side if value is not None] for side in (before, after))
    if not old or not new or not median(old):
        return
    change = median(new) / median(old) - 1
    if abs(change) > TELLING:
        print(f"{name}: {median(old):g} -> {median(new):g} ({change:+.0%})")


def numbers(command: Sequence[str], root: Path) -> dict[str, float]:
    """Every number that a benchmark prints, by its path in the JSON; empty if it fails with the code under `root`."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]],
        env={**os.environ, "PYTHONPATH": str(root), "SKYRL_CODE": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    return {} if ran.returncode else dict(leaves(json.loads(ran.stdout.splitlines()[-1])))


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Path and value of each number in nested tables and lists."""
    items: list[tuple[Any, Any]] = []
    if isinstance(data, dict):
        items = list(data.items())
    elif isinstance(data, list):
        items = list(enumerate(data))
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield path, float(data)
    for key, value in items:
        yield from leaves(value, f"{path}.{key}".removeprefix("."))


if __name__ == "__main__":
    if sys.argv[1:] == ["--short"]:
        for command in SHORT:
            subprocess.run([sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]], check=True)
    else:
        main()
