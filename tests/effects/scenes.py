"""Making the scenes that probes look at: the minimal run of a kind, with a few values changed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from skyrl.config import load
from skyrl.config.loading.check import check
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.errors import ConfigError, Problem
from tests import supervised_run
from tests.effects.probe import Observable, Probe, Scene
from tests.nano_run import as_words, overrides

OUT = Path("out")
"""Folder of the runs, below the working directory: results do not depend on where a scene lies."""


def minimal(kind: str, nano: Path) -> dict[str, Any]:
    """Dotted paths and values of the smallest run of a kind, which is two steps long and the same twice to the last
    bit; its files are below the working directory.
    """
    if kind == "rl":
        return overrides(nano, OUT, trainer__deterministic=True, trainer__max_training_steps=2)
    OUT.mkdir(exist_ok=True)
    return supervised_run.settings(nano, OUT, kind, deterministic=True, num_steps=2)


def scene(kind: str, values: Mapping[str, Any], nano: Path) -> Scene:
    """The minimal run with these values changed, in the working directory."""
    settings = minimal(kind, nano) | {path: _filled(value, nano) for path, value in values.items()}
    loaded = load([], settings)
    run, origins, broken = resolve_with_origins(loaded.config, loaded.origins)
    return Scene(run, tuple(check(run, origins, broken)), tuple(as_words(settings)), nano)


def problems_of(kind: str, values: Mapping[str, Any], nano: Path) -> tuple[Problem, ...]:
    """Everything that reading and checking such a run reports."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        try:
            return scene(kind, values, nano).problems
        except ConfigError as error:
            return tuple(error.problems)


def see(observable: Observable, kind: str, values: Mapping[str, Any], nano: Path) -> object:
    """What the observable shows of such a run, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        built_scene = scene(kind, values, nano)
        errors = [problem for problem in built_scene.problems if problem.severity == "error"]
        assert observable.refuses or not errors, f"the context of a probe has to run: {errors}"
        return observable.see(built_scene)


class Sight:
    """What observables show; a run that several probes compare with is looked at once for all of them."""

    def __init__(self, nano: Path) -> None:
        self.nano = nano
        self._before: dict[tuple[str, str, str], object] = {}

    def before(self, probe: Probe, context: Mapping[str, Any]) -> object:
        """What is there without the change; it is looked at twice, since what changes by itself shows nothing."""
        key = (probe.kind, repr(sorted(context.items())), probe.seen_in.shows)
        if key not in self._before:
            first, second = (see(probe.seen_in, probe.kind, context, self.nano) for _ in range(2))
            assert first == second, f"{probe.seen_in.shows}: not the same twice"
            self._before[key] = first
        return self._before[key]

    def changes(self, probe: Probe, context: Mapping[str, Any]) -> bool:
        """Does the probe's value make a difference there?"""
        after = see(probe.seen_in, probe.kind, {**context, probe.path: probe.value}, self.nano)
        return after != self.before(probe, context)


def _filled(value: Any, nano: Path) -> Any:
    """The value with `{nano}` replaced in its texts."""
    match value:
        case str():
            return value.replace("{nano}", str(nano))
        case Mapping():
            return {name: _filled(inner, nano) for name, inner in value.items()}
        case list() | tuple():
            return [_filled(inner, nano) for inner in value]
    return value
