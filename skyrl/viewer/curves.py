"""Curves of one or several runs as Plotly figures: defines which metrics share a chart, and its title."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import plotly.graph_objects as go
from attrs import frozen

Records = Sequence[Mapping[str, Any]]
"""The lines of a `metrics.jsonl`."""

CHARTS: tuple[tuple[str, str], ...] = (
    ("Reward", r"reward/avg_raw_reward|reward/component/.+|train/(accuracy|margin)"),
    ("Evaluation", r"eval/.+/(avg_score|loss)|eval/all/pass_at_([2-9]|\d\d+)"),
    ("Loss", r"policy/(final_loss|policy_loss)|critic/critic_loss|train/loss"),
    ("KL", r"policy/policy_kl|loss/avg_kl"),
    ("Engine and learner", r"policy/rollout_train_logprobs_abs_diff_mean|weight_sync/parity_mean"),
    ("Entropy", r"policy/policy_entropy"),
    ("Clip share", r"policy/clip_ratio|policy/.+_clip_high_ratio|policy/.+_masked_ratio"),
    ("Gradient norm", r"(policy|critic|train)/grad_norm"),
    ("Learning rate", r"(policy|critic)/.+_lr|train/lr"),
    ("Lengths", r"generate/(avg|max|min)_num_tokens"),
    ("Truncated, repeated, without contrast", r"generate/(truncated|repeated)_ratio|reward/zero_variance_groups"),
    ("Staleness", r"async/staleness_(mean|max|ratio)"),
    ("Tokens per second", r"trainer/tokens_per_second"),
    ("Memory", r"memory/.+"),
    ("Engines", r"inference/engines_(in_service|lost)"),
)
"""Title of each chart, and pattern of its metrics. A chart without a metric in any run is left out."""

_WHOLE_TIMES = ("timing/step", "timing/all_steps")
_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@frozen(kw_only=True)
class Chart:
    """One figure, as JSON for Plotly."""

    title: str
    figure: str


def charts(runs: Mapping[str, Records]) -> Iterator[Chart]:
    """All charts of these named runs, with a colour for each run and a dash style for each metric."""
    for title, pattern in CHARTS:
        names = _names(runs, re.compile(pattern))
        if names:
            yield Chart(title=title, figure=_figure(_lines(runs, names)).to_json())
    for run, records in runs.items():
        phases = [name for name in _names({run: records}, re.compile("timing/.+")) if name not in _WHOLE_TIMES]
        if phases:
            title = "Time by phase, s" + (f": {run}" if len(runs) > 1 else "")
            yield Chart(title=title, figure=_figure(_areas(records, phases)).to_json())


def _names(runs: Mapping[str, Records], pattern: re.Pattern[str]) -> list[str]:
    """Metrics that match, in the order of their first occurrence."""
    return list(dict.fromkeys(n for records in runs.values() for line in records for n in line if pattern.fullmatch(n)))


def _lines(runs: Mapping[str, Records], names: Sequence[str]) -> Iterator[go.Scatter]:
    for number, (run, records) in enumerate(runs.items()):
        for which, name in enumerate(names):
            steps, values = _series(records, name)
            if steps:
                single = len(runs) == 1
                colour = _COLOURS[(which if single else number) % len(_COLOURS)]
                yield go.Scatter(
                    x=steps,
                    y=values,
                    name=name if single else f"{run}: {name}",
                    mode="lines" if len(steps) > 1 else "markers",
                    line={"color": colour, "dash": "solid" if single else _DASHES[which % len(_DASHES)]},
                )


def _areas(records: Records, names: Sequence[str]) -> Iterator[go.Scatter]:
    steps = [line["step"] for line in records]
    for number, name in enumerate(names):
        values = [_number(line.get(name)) or 0.0 for line in records]
        colour = _COLOURS[number % len(_COLOURS)]
        yield go.Scatter(
            x=steps,
            y=values,
            name=name.removeprefix("timing/"),
            stackgroup="time",
            line={"color": colour, "width": 0.5},
        )


def _series(records: Records, name: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], value) for line in records if (value := _number(line.get(name))) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and isfinite(value) else None


def _figure(traces: Iterator[go.Scatter]) -> go.Figure:
    figure = go.Figure(list(traces))
    figure.update_layout(
        template="none",
        height=320,
        margin={"l": 56, "r": 12, "t": 8, "b": 24},
        hovermode="x unified",
        legend={"orientation": "h", "y": -0.1, "font": {"size": 11}},
        showlegend=True,
    )
    return figure
