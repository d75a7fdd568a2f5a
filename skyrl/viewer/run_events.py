"""Events of a run besides its steps: checkpoints, alarms, skipped steps, failures, lost engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from attrs import frozen

from skyrl.tracking.jsonlines import JsonLines
from skyrl.viewer.run_metrics import Series

MOST = 500
"""Largest number of events in a report."""


@frozen(kw_only=True, order=True)
class RunEvent:
    """Something that happened in a step."""

    step: int
    kind: str
    words: str


def events(run: Path, series: Mapping[str, Series]) -> list[RunEvent]:
    """Events of a run in the order of its steps, the first `MOST` of them."""
    return sorted([*_checkpoints(run), *troubles(run, series)])[:MOST]


def troubles(run: Path, series: Mapping[str, Series]) -> list[RunEvent]:
    """The events that may be a reason to look: all but checkpoints."""
    alarms = [
        RunEvent(step=int(line["step"]), kind="alarm", words=f"{line.get('name')}: {line.get('reason')}")
        for line in JsonLines(run / "alarms.jsonl").read()
    ]
    return sorted([*_metric_events(series), *_engines(series), *alarms])


_COUNTED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("trainer/skipped_steps", "skipped step", lambda _: "left out because a number was not finite"),
    ("policy/skipped_updates", "skipped update", lambda share: f"{share:g} of the optimizer steps of the policy"),
    ("critic/skipped_updates", "skipped update", lambda share: f"{share:g} of the optimizer steps of the critic"),
    ("rollout/failures", "failures", lambda count: f"{count:g} attempts failed in the environment"),
    ("rollout/dropped_groups", "dropped groups", lambda count: f"{count:g} groups left out after failures"),
    ("eval/failures", "failures", lambda count: f"{count:g} attempts failed in evaluation"),
)


def _metric_events(series: Mapping[str, Series]) -> Iterator[RunEvent]:
    for name, kind, words in _COUNTED:
        if name in series:
            for step, value in zip(series[name].steps, series[name].highs, strict=True):
                if value > 0:
                    yield RunEvent(step=step, kind=kind, words=words(value))


def _engines(series: Mapping[str, Series]) -> Iterator[RunEvent]:
    before, lost = 0.0, series.get("inference/engines_lost", Series())
    for step, count in zip(lost.steps, lost.highs, strict=True):
        if count != before:
            yield RunEvent(step=step, kind="engines", words=f"{count:g} out of service, {before:g} before")
        before = count


def _checkpoints(run: Path) -> Iterator[RunEvent]:
    """Checkpoints that exist now; older ones may have been deleted."""
    from skyrl.checkpoint.names import step_of  # here: a page of `skyrl view` does not wait for the configuration
    from skyrl.errors import SkyRLError
    from skyrl.runs.stored_runs import checkpoints_of

    try:
        folder = checkpoints_of(str(run))
    except SkyRLError:
        return
    for path in Path(folder).glob("*") if "://" not in folder else ():
        step = step_of(path.name)
        if step is not None:
            yield RunEvent(step=step, kind="checkpoint", words=path.name)
