"""The distinct trainings of a sweep, each with a permanent number and folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from skyrl.config.derive.every_kind import names_a_service
from skyrl.config.loading.kinds import kind_of
from skyrl.config.loading.load import compose, load
from skyrl.config.loading.standalone_file import kept_text
from skyrl.errors import ConfigError, Problem, UserError
from skyrl.launchers.job import TASKS, state_in
from skyrl.launchers.prepared import RUN_FILE
from skyrl.storage.atomic import write_file
from skyrl.sweeps.sweep_file import Point, SweepConfig, draws_of, flat, points_of
from skyrl.tree import fingerprint, get_at, thaw
from skyrl.tree.classes import fields_of

_NUMBERS = "trials.json"


@frozen(kw_only=True)
class SweepTrial:
    """One training of the sweep."""

    number: int
    point: Point
    folder: Path
    """Folder of the trial; its run has the folder `run` inside."""

    run: Any = field(repr=False)
    """Resolved configuration of the run."""

    text: str = field(repr=False)
    """Text of the trial's configuration file."""

    seed_field: str

    @property
    def run_folder(self) -> Path:
        """Folder of the run, with its metrics."""
        return self.folder / "run"

    @property
    def state(self) -> str:
        """State of the run that was started last: finished, failed, stopped, running, starting; new if none was."""
        return state_in(self.folder)


@frozen(kw_only=True)
class Trials:
    """All trials of a sweep."""

    folder: Path
    trials: tuple[SweepTrial, ...]
    twice: tuple[str, ...] = ()
    """Sentences about points that describe the same training as an earlier one."""

    def write(self) -> None:
        """Store the numbers of all trainings, and each trial's configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known = _numbers(self.folder) | {fingerprint(trial.run): trial.number for trial in self.trials}
        write_file(self.folder / _NUMBERS, json.dumps(known, indent=2) + "\n")
        for trial in self.trials:
            trial.folder.mkdir(parents=True, exist_ok=True)
            write_file(trial.folder / RUN_FILE, trial.text)


def folder_of(sweep: SweepConfig) -> Path:
    """Folder of the sweep."""
    return Path(sweep.folder or f"sweeps/{sweep.name}").absolute()


def trials_of(sweep: SweepConfig, environ: Mapping[str, str], *, device: str | None = None) -> Trials:
    """Every distinct training, composed and checked; numbers from an earlier start are kept. Writes nothing.

    `device` is the machines' device, used if the run leaves it open. Raises `ConfigError` with all problems.
    """
    folder, problems = folder_of(sweep), list[Problem]()
    numbers, trials, twice = _numbers(folder), dict[str, SweepTrial](), list[str]()
    kind = kind_of(load(sweep.run, environ=environ).config)
    for point in points_of(sweep, kind.path("seed")):
        try:
            values = {**dict(flat(sweep.set)), **point}
            if device and get_at(load(sweep.run, thaw(values), environ=environ).config, kind.path("device")) == "auto":
                values[kind.path("device")] = device
            resolved = compose(sweep.run, thaw(values), environ=environ).config
            mark = fingerprint(resolved)
            if mark in trials:
                twice.append(f"{spelled(point)} is the same training as {spelled(trials[mark].point)}")
                continue
            number = numbers.setdefault(mark, len(numbers))
            trials[mark] = _trial(sweep, point, number, folder, values, environ)
        except ConfigError as error:
            found = [_place_in_table(problem, sweep, kind.path("seed")) for problem in error.problems]
            problems += [problem for problem in found if problem not in problems]
    if problems:
        raise ConfigError(problems, title="This sweep cannot start")
    return Trials(folder=folder, trials=tuple(trials.values()), twice=tuple(twice))


def _place_in_table(problem: Problem, sweep: SweepConfig, seed_field: str) -> Problem:
    """The problem, placed in the sweep's table that sets the value; if several do, in the one that takes precedence."""
    tables: list[tuple[str, Collection[str]]] = [
        ("seeds", [seed_field] if sweep.seeds else []),
        ("grid", dict(flat(sweep.grid))),
        ("random.values", draws_of(sweep.random)),
        ("points", [path for point in sweep.points for path, _ in flat(point)]),
        ("set", dict(flat(sweep.set))),
    ]
    for name, paths in tables:
        if any(problem.path == path or problem.path.startswith(f"{path}.") for path in paths):
            return evolve(problem, location=f"{name} of the sweep")
    return problem


def _trial(
    sweep: SweepConfig,
    point: Point,
    number: int,
    folder: Path,
    values: Mapping[str, Any],
    environ: Mapping[str, str],
) -> SweepTrial:
    """The trial of a point, whose values are set in `values`, with output in a folder of its own."""
    own = folder / TASKS / str(number)
    before: Any = load(sweep.run, thaw(values), environ=environ).config
    kind = kind_of(before)
    table: Any = get_at(before, kind.trainer)
    inside = {"run_path": "run", "ckpt_path": "checkpoints", "export_path": "exports"}
    written = {name: str(own / inside[name]) for name in inside if name in fields_of(type(table))}
    if names_a_service(table):
        written["run_name"] = f"{sweep.name}-{number}"
    placed = {kind.path(name): value for name, value in written.items()}
    composed = compose(sweep.run, thaw({**values, **placed}), environ=environ)
    return SweepTrial(
        number=number,
        point=dict(point),
        folder=own,
        run=composed.config,
        text=kept_text(composed.written, composed.origins),
        seed_field=kind.path("seed"),
    )


def spelled(point: Point) -> str:
    """The point as text: `trainer.seed=1 trainer.epochs=2`."""
    texts = {path: value if isinstance(value, str) else json.dumps(thaw(value)) for path, value in point.items()}
    return " ".join(f"{path}={text}" for path, text in texts.items()) or "the run as it is"


def _numbers(folder: Path) -> dict[str, int]:
    """Fingerprint -> number of every training that the sweep ever had. Raises `UserError` if the file is damaged."""
    file = folder / _NUMBERS
    if not file.exists():
        return {}
    try:
        return {str(mark): int(number) for mark, number in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise UserError(f"{file} cannot be read: it says which training has which number") from None


def waiting(trials: Trials, *, retry: bool) -> Iterator[SweepTrial]:
    """Trials to train now, or to wait for: all that have not finished; with a reported failure only if `retry`."""
    for trial in trials.trials:
        if trial.state != "finished" and (retry or trial.state != "failed"):
            yield trial
