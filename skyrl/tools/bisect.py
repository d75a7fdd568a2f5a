"""Finds where two runs diverge: the first step that differs, and within it the first token, tensor or key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl.config.loading.code_digests import changed_code, stored_digests
from skyrl.errors import UserError
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.stored_runs import stored_run
from skyrl.tools.comparing import Difference, differences_of_computing, differences_of_samples
from skyrl.tracking.metric_table import depends_on_machine
from skyrl.tree import differences


@frozen(kw_only=True)
class Parting:
    """Result of comparing two runs: the steps in common, and the first differences."""

    configuration: dict[str, tuple[Any, Any]]
    """Fields that differ and affect a run's numbers -> both values."""

    code: dict[str, tuple[str | None, str | None]]
    """Files of the runs' own code that differ -> both digests. See `skyrl.config.loading.code_digests`."""

    compared: tuple[int, ...]
    """Steps that were compared, up to the first that differs."""

    recorded: bool
    """Whether both runs have recordings. Otherwise only their metrics are compared, which is less precise."""

    differences: tuple[Difference, ...]
    """Differences in the first step that differs, in the order of the step's stages."""

    only_in_one: tuple[int, ...]
    """Steps that only one of the runs has."""


def bisect(one: Path, other: Path) -> Parting:
    """Compare two runs by their folders. Raises `UserError` for a folder that is not a run's and for runs of different
    kinds, and `DataError` for a damaged recording.
    """
    runs = stored_run(one), stored_run(other)
    if type(runs[0]) is not type(runs[1]):
        raise UserError(f"the runs differ in kind: {one} has kind = {runs[0].kind}, {other} has kind = {runs[1].kind}")
    changed = differences(*runs, roles=("identity", "numerics"))
    folders = RunFolder(one), RunFolder(other)
    recorded = all(folder.recording().steps() for folder in folders)
    metrics = () if recorded else tuple(map(_metrics, folders))
    steps_of = [set(metric) for metric in metrics or (folder.recording().steps() for folder in folders)]
    compared: list[int] = []
    result: tuple[Difference, ...] = ()
    for step in sorted(steps_of[0] & steps_of[1]):
        compared.append(step)
        result = tuple(
            _recording_differences(*folders, step) if recorded else _metric_differences(*(run[step] for run in metrics))
        )
        if result:
            break
    return Parting(
        configuration=changed,
        code=changed_code(stored_digests(str(one)), stored_digests(str(other))),
        compared=tuple(compared),
        recorded=recorded,
        differences=result,
        only_in_one=tuple(sorted(steps_of[0] ^ steps_of[1])),
    )


def _recording_differences(one: RunFolder, other: RunFolder, step: int) -> Iterator[Difference]:
    first, second = one.recording(), other.recording()
    groups = first.sampled(step).groups
    yield from differences_of_samples(groups, second.sampled(step).groups)
    yield from differences_of_computing(first.computed(step), second.computed(step), groups)


def _metric_differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield Difference("metrics", name, repr(one.get(name)), repr(other.get(name)))


def _metrics(folder: RunFolder) -> dict[int, dict[str, Any]]:
    return {
        record["step"]: {name: value for name, value in record.items() if not depends_on_machine(name)}
        for record in folder.metrics.read()
    }
