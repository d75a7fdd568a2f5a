"""The comparison of a sweep's trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from attrs import frozen

from skyrl.storage.json_files import records_of
from skyrl.sweeps.trials import Trial, spelled
from skyrl.tracking.metric_table import METRICS, unknown
from skyrl.tree.names import nearest


@frozen(kw_only=True)
class Result:
    """Results of the trials that differ only in their seeds."""

    point: str
    values: tuple[float, ...]
    """Best value of the metric in each trial that has one."""

    trials: tuple[int, ...]
    states: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds; NaN if no trial has a value."""
        return fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds (n - 1); None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None


def results(trials: Sequence[Trial], metric: str, goal: Literal["max", "min"]) -> list[Result]:
    """The results, best first; points without a value come last."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        point = {path: value for path, value in trial.point.items() if path != trial.seed_field}
        groups.setdefault(spelled(point), []).append(trial)
    found = [_result(point, group, metric, goal) for point, group in groups.items()]
    sign = -1 if goal == "max" else 1
    return sorted(found, key=lambda each: (not each.values, sign * each.mean if each.values else 0.0))


def unmeasured(metric: str) -> Iterator[str]:
    """A sentence about a metric that skyrl does not log, though a custom loss or environment may."""
    for missing in unknown([metric]):
        near = nearest(missing, [spec.name for _, specs in METRICS for spec in specs])
        hint = f"did you mean {near}?" if near else "docs/metrics.md lists all metrics"
        yield f"skyrl has no metric {missing}, so runs can be compared only if your code logs it; {hint}"


def table(found: Sequence[Result], metric: str) -> str:
    """The results as a Markdown table, one row per point."""
    rows = [f"| {metric} | over seeds | trials | point |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, found)])


def as_data(found: Sequence[Result]) -> list[dict[str, Any]]:
    """The results as plain data, for `results.json`."""
    return [
        {
            "point": each.point,
            "trials": list(each.trials),
            "states": list(each.states),
            "values": list(each.values),
            "mean": each.mean if each.values else None,
            "spread": each.spread,
        }
        for each in found
    ]


def _result(point: str, group: Sequence[Trial], metric: str, goal: Literal["max", "min"]) -> Result:
    best = [_best(trial.run_folder / "metrics.jsonl", metric, goal) for trial in group]
    return Result(
        point=point,
        values=tuple(value for value in best if value is not None),
        trials=tuple(trial.number for trial in group),
        states=tuple(trial.state for trial in group),
    )


def _best(file: Path, metric: str, goal: Literal["max", "min"]) -> float | None:
    values = [float(record[metric]) for record in records_of(file) if isinstance(record.get(metric), int | float)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return max(finite) if goal == "max" else min(finite)


def _row(result: Result) -> str:
    shown = f"{result.mean:.4g}" if result.values else "-"
    over = f"± {result.spread:.2g} ({len(result.values)})" if result.spread is not None else ""
    states = sorted({state for state in result.states if state != "finished"})
    trials = ", ".join(map(str, result.trials)) + (f" ({', '.join(states)})" if states else "")
    return f"| {shown} | {over} | {trials} | {result.point.replace('|', chr(92) + '|')} |"
