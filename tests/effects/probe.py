"""A probe: one leaf, another value of it, and where the difference is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl.errors import Problem
from skyrl.tree import FrozenDict


@frozen
class Scene:
    """One configuration, ready to be looked at. The working directory is an empty folder made for it."""

    run: Any
    """The resolved tree."""

    problems: tuple[Problem, ...]
    """What `check` reports about it, errors included."""

    words: tuple[str, ...]
    """The same configuration as arguments of the command."""

    nano: Path
    """Folder of the nano model and its data, see `tests/conftest.py`."""


@frozen
class Observable:
    """Something that a configuration decides and that a test can look at: equal configurations give equal results."""

    shows: str
    """What it is, as the table in `tests/effects/fields.md` prints it after "changes"."""

    see: Callable[[Scene], object]
    """Looks. The result is compared by `==`."""

    long: bool = False
    """Takes more than about a second, so that its probes run with `--long` alone."""

    refuses: bool = False
    """Looks at a configuration that `check` refuses, too."""


def observable(shows: str, *, long: bool = False, refuses: bool = False) -> Callable[..., Observable]:
    """Makes a function from a scene to something comparable an `Observable`."""
    return lambda see: Observable(shows, see, long, refuses)


@frozen
class Probe:
    """One leaf that is changed alone, in a run in which it matters.

    Values may hold `{nano}`, which stands for the folder of the nano model.
    """

    path: str
    """Dotted path of the leaf, or of a free-form table."""

    value: Any
    """Another valid value."""

    seen_in: Observable

    context: Mapping[str, Any] = FrozenDict()
    """Dotted paths and values in which the leaf matters, on top of the minimal run of its kind."""

    kind: str = "rl"

    quick: bool = False
    """Runs by default although its observable is long: one of a handful."""

    @property
    def is_long(self) -> bool:
        """Does it run with `--long` alone?"""
        return self.seen_in.long and not self.quick

    def __str__(self) -> str:
        return f"{self.kind}-{self.path}"
