"""Curves of runs as Plotly figures: one for each panel, with each run's name at the end of its line.

Figures are made as plain data: Plotly's own classes take a second to import and check every point.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from statistics import fmean
from typing import Any

from attrs import frozen

from skyrl.viewer.panels import BYTES, Panel, Runs, panels, phases
from skyrl.viewer.run_metrics import Series

COLOURS = ("#2f74d0", "#d0661a", "#12907a", "#a45bb8", "#7b8591", "#a98a12", "#c43c68", "#5a68d6")
"""Colours of runs, or of the lines of one run, legible on white and on black: those of `look.css`."""

MOST_POINTS = 800
"""Largest number of points of a line in a report: a chart has about as many pixels."""

Trace = dict[str, Any]
"""One line or area of a figure, in Plotly's JSON."""

_MOST_PHASES = 10
_APART = 0.09
"""Least distance between the labels of two lines, as a share of the height of a chart."""


@frozen(kw_only=True)
class Chart:
    """One figure, as Plotly's JSON, and the texts around it."""

    section: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    figure: Mapping[str, Any]


def charts(runs: Runs) -> Iterator[Chart]:
    """All charts of these runs: those of one title have the same axes for all runs."""
    for panel in panels(runs):
        yield Chart(
            section=panel.section,
            title=panel.title,
            unit=panel.unit,
            metrics=panel.metrics,
            figure=_figure(list(_lines(panel, runs)), _labels(panel, runs), panel.unit),
        )
    parts = {run: phases(series) for run, series in runs.items()}
    highest = max((_height(own) for own in parts.values()), default=0.0)
    for run, own in parts.items():
        if own:
            figure = _figure(list(_areas(own)), [])
            figure["layout"] |= {"showlegend": True, "height": 300}
            figure["layout"]["yaxis"]["range"] = [0, 1.05 * highest]
            yield Chart(
                section="Time",
                title="Time by phase" + (f": {run}" if len(runs) > 1 else ""),
                unit="seconds of a step",
                metrics=("timing/...",),
                figure=figure,
            )


def templates() -> dict[str, object]:
    """Plotly's own templates for a light and for a dark page, with the page's ground behind the curves."""
    clear = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    stored = files("plotly").joinpath("package_data", "templates")
    named = (("light", "plotly_white.json"), ("dark", "plotly_dark.json"))
    plain = {name: json.loads(stored.joinpath(file).read_text(encoding="utf-8")) for name, file in named}
    return {name: own | {"layout": own["layout"] | clear} for name, own in plain.items()}


def _colour(panel: Panel, number: int, runs: Runs) -> str:
    index = number if len(runs) == 1 else list(runs).index(panel.lines[number].run)
    return COLOURS[index % len(COLOURS)]


def _lines(panel: Panel, runs: Runs) -> Iterator[Trace]:
    for number, line in enumerate(panel.lines):
        thinned, colour = line.series.thinned(MOST_POINTS), _colour(panel, number, runs)
        steps = thinned.steps
        if thinned.lows != thinned.highs:  # a point stands for several steps: the band is from the least to the largest
            yield _edge(steps, thinned.lows)
            yield _edge(steps, thinned.highs, fill="tonexty", fillcolor=_faint(colour))
        dash = {"max": "dot", "min": "dot"}.get(line.label, "solid")
        yield _scatter(
            steps,
            thinned.means,
            name=_name(panel, number, runs),
            mode="lines" if len(steps) > 1 else "markers",
            line={"color": colour, "width": 2, "dash": dash},
        )


def _scatter(steps: Sequence[int], values: Sequence[float], **more: object) -> Trace:
    rounded = [float(f"{value:.6g}") for value in values]  # six digits are more than a chart shows
    return {"type": "scatter", "x": steps, "y": rounded, **more}


def _edge(steps: Sequence[int], values: Sequence[float], **fill: str) -> Trace:
    """One edge of a band, which shows no line."""
    return _scatter(steps, values, mode="lines", line={"width": 0}, hoverinfo="skip", showlegend=False, **fill)


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def _name(panel: Panel, number: int, runs: Runs) -> str:
    line = panel.lines[number]
    return " ".join(part for part in (line.run if len(runs) > 1 or not line.label else "", line.label) if part)


def _labels(panel: Panel, runs: Runs) -> list[dict[str, object]]:
    """The name of each line at its end, moved up or down where it would cover another one."""
    if len(panel.lines) < 2:
        return []
    values = [value for line in panel.lines for value in line.series.values]
    low, height = min(values), (max(values) - min(values)) or 1.0
    ends = sorted((line.series.values[-1], number) for number, line in enumerate(panel.lines))
    offsets, below = [], -1.0
    for value, _ in ends:
        below = max((value - low) / height, below + _APART)
        offsets.append(below)
    too_high = max(0.0, offsets[-1] - 1.0)
    return [
        {
            "x": panel.lines[number].series.steps[-1],
            "y": low + (offset - too_high) * height,
            "text": f" {_plain(_name(panel, number, runs))}",
            "showarrow": False,
            "xanchor": "left",
            "font": {"color": _colour(panel, number, runs), "size": 12},
        }
        for offset, (_, number) in zip(offsets, ends, strict=True)
    ]


def _plain(text: str) -> str:
    """The text without what Plotly reads as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")[:24]


def _areas(own: Mapping[str, Series]) -> Iterator[Trace]:
    steps = sorted({step for series in own.values() for step in series.steps})
    by_length = sorted(own.items(), key=lambda pair: -sum(pair[1].values))
    rest = by_length[_MOST_PHASES:]
    for number, (name, series) in enumerate(by_length[:_MOST_PHASES]):
        yield _area(name, COLOURS[number % len(COLOURS)], steps, [series])
    if rest:
        yield _area(f"{len(rest)} others", "#999999", steps, [series for _, series in rest])


def _area(name: str, colour: str, steps: Sequence[int], summed: Sequence[Series]) -> Trace:
    values = [dict(zip(series.steps, series.values, strict=True)) for series in summed]
    heights = [sum(value.get(step, 0.0) for value in values) for step in steps]
    width = -(-len(steps) // MOST_POINTS)
    means = [fmean(heights[start : start + width]) for start in range(0, len(steps), width)]
    line = {"color": colour, "width": 0.5}
    return _scatter(steps[::width], means, name=_plain(name), stackgroup="time", line=line)


def _height(own: Mapping[str, Series]) -> float:
    """Seconds of the longest step."""
    total: dict[int, float] = {}
    for series in own.values():
        for step, value in zip(series.steps, series.values, strict=True):
            total[step] = total.get(step, 0.0) + value
    return max(total.values(), default=0.0)


def _figure(traces: Sequence[Trace], labels: Sequence[Mapping[str, object]], unit: str = "") -> dict[str, Any]:
    first, last = min(trace["x"][0] for trace in traces), max(trace["x"][-1] for trace in traces)
    room = 8 + 7 * max((len(str(label["text"])) for label in labels), default=0)
    layout = {
        "height": 230,
        "margin": {"l": 52, "r": room, "t": 8, "b": 34},
        "hovermode": "x unified",
        "showlegend": False,
        "legend": {"orientation": "h", "y": -0.2, "font": {"size": 11}},
        "annotations": list(labels),
        "xaxis": {
            "title": {
                "text": f"step {first} to {last}" if last > first else f"step {first}",
                "font": {"size": 11},
                "standoff": 4,
            }
        },
        "yaxis": {"exponentformat": "power", "automargin": True, "tickformat": ".3~s" if unit == BYTES else ""},
    }
    return {"data": traces, "layout": layout}
