"""The comparison of a sweep's trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from attrs import frozen

from skyrl.storage.json_files import records_of
from skyrl.sweeps.trials import SweepTrial, spelled
from skyrl.tracking.metric_table import METRICS, unknown
from skyrl.tree.names import nearest


@frozen(kw_only=True)
class PointResult:
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


def results(trials: Sequence[SweepTrial], metric: str, goal: Literal["max", "min"]) -> list[PointResult]:
    """The results, best first; points without a value come last."""
    groups: dict[str, list[SweepTrial]] = {}
    for trial in trials:
        point = {path: value for path, value in trial.point.items() if path != trial.seed_field}
        groups.setdefault(spelled(point), []).append(trial)
    compared = []
    for text, group in groups.items():
        best = [_best(trial.run_folder / "metrics.jsonl", metric, goal) for trial in group]
        compared.append(
            PointResult(
                point=text,
                values=tuple(value for value in best if value is not None),
                trials=tuple(trial.number for trial in group),
                states=tuple(trial.state for trial in group),
            )
        )
    sign = -1 if goal == "max" else 1
    return sorted(compared, key=lambda result: (not result.values, sign * result.mean if result.values else 0.0))


def unmeasured(metric: str) -> Iterator[str]:
    """A sentence about a metric that skyrl does not log, though a custom loss or environment may."""
    for missing in unknown([metric]):
        near = nearest(missing, [spec.name for _, specs in METRICS for spec in specs])
        hint = f"did you mean {near}?" if near else "docs/metrics.md lists all metrics"
        yield f"skyrl has no metric {missing}, so runs can be compared only if your code logs it; {hint}"


def table(compared: Sequence[PointResult], metric: str) -> str:
    """The results as a Markdown table, one row per point."""
    rows = [f"| {metric} | over seeds | trials | point |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, compared)])


def as_data(compared: Sequence[PointResult]) -> list[dict[str, Any]]:
    """The results as plain data, for `results.json`."""
    return [
        {
            "point": result.point,
            "trials": list(result.trials),
            "states": list(result.states),
            "values": list(result.values),
            "mean": result.mean if result.values else None,
            "spread": result.spread,
        }
        for result in compared
    ]


def _best(file: Path, metric: str, goal: Literal["max", "min"]) -> float | None:
    values = [float(record[metric]) for record in records_of(file) if isinstance(record.get(metric), int | float)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return max(finite) if goal == "max" else min(finite)


def _row(result: PointResult) -> str:
    mean = f"{result.mean:.4g}" if result.values else "-"
    over = f"± {result.spread:.2g} ({len(result.values)})" if result.spread is not None else ""
    states = sorted({state for state in result.states if state != "finished"})
    trials = ", ".join(map(str, result.trials)) + (f" ({', '.join(states)})" if states else "")
    return f"| {mean} | {over} | {trials} | {result.point.replace('|', chr(92) + '|')} |"
