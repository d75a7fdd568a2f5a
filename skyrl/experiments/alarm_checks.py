"""The check that alarms watch metrics which a run logs. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.errors import Problem
from skyrl.runs.run_tree import AnyRun
from skyrl.tracking.metric_table import METRICS, unknown
from skyrl.tree.names import nearest


def alarms_watch_logged_metrics(run: AnyRun) -> Iterator[Problem]:
    """Each alarm watches a metric that skyrl logs. A custom loss may log others, so a violation is a warning."""
    names = [spec.name for _, specs in METRICS for spec in specs]
    for alarm in run.trainer.alarms:
        for missing in unknown(filter(None, (alarm.metric, alarm.against))):
            near = nearest(missing, names)
            yield Problem(
                path=run.trainer.path_of("alarms"),
                message=f"skyrl has no metric {missing}: the alarm never fires unless your own code logs it",
                hint=f"did you mean {near}?" if near else "docs/metrics.md lists all metrics",
                severity="warning",
            )
