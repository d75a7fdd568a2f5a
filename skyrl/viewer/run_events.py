"""Events of a run besides its steps: checkpoints, alarms, skipped steps, failures, lost engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl.checkpoint.names import step_of
from skyrl.errors import SkyRLError
from skyrl.runs.stored_runs import checkpoints_of
from skyrl.tracking.jsonlines import JsonLines

MOST = 500
"""Largest number of events in a report."""


@frozen(kw_only=True, order=True)
class RunEvent:
    """Something that happened in a step."""

    step: int
    kind: str
    words: str


def events(run: Path, records: Sequence[Mapping[str, Any]]) -> list[RunEvent]:
    """Events of a run in the order of its steps, the first `MOST` of them."""
    alarms = [
        RunEvent(step=int(line["step"]), kind="alarm", words=f"{line.get('name')}: {line.get('reason')}")
        for line in JsonLines(run / "alarms.jsonl").read()
    ]
    return sorted([*_checkpoints(run), *_of_metrics(records), *_engines(records), *alarms])[:MOST]


_COUNTED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("trainer/skipped_steps", "skipped step", lambda _: "left out because a number was not finite"),
    ("policy/skipped_updates", "skipped update", lambda share: f"{share:g} of the optimizer steps of the policy"),
    ("critic/skipped_updates", "skipped update", lambda share: f"{share:g} of the optimizer steps of the critic"),
    ("rollout/failures", "failures", lambda count: f"{count:g} attempts failed in the environment"),
    ("rollout/dropped_groups", "dropped groups", lambda count: f"{count:g} groups left out after failures"),
    ("eval/failures", "failures", lambda count: f"{count:g} attempts failed in evaluation"),
)


def _of_metrics(records: Sequence[Mapping[str, Any]]) -> Iterator[RunEvent]:
    for line in records:
        for name, kind, words in _COUNTED:
            value = line.get(name)
            if isinstance(value, (int, float)) and value > 0:
                yield RunEvent(step=line["step"], kind=kind, words=words(value))


def _engines(records: Sequence[Mapping[str, Any]]) -> Iterator[RunEvent]:
    before = 0.0
    for line in records:
        lost = line.get("inference/engines_lost", before)
        if lost != before:
            yield RunEvent(step=line["step"], kind="engines", words=f"{lost:g} out of service, {before:g} before")
        before = lost


def _checkpoints(run: Path) -> Iterator[RunEvent]:
    """Checkpoints that exist now; older ones may have been deleted."""
    try:
        folder = checkpoints_of(str(run))
    except SkyRLError:
        return
    for path in Path(folder).glob("*") if "://" not in folder else ():
        step = step_of(path.name)
        if step is not None:
            yield RunEvent(step=step, kind="checkpoint", words=path.name)
