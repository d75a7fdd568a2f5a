"""How a notebook shows a run: folder, status, score before and after, and a small curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float]]

_CURVES = (
    ("reward/avg_raw_reward", "reward", "#4c78a8"),
    ("eval/all/avg_score", "evaluation", "#e45756"),
    ("train/loss", "loss", "#4c78a8"),
    ("eval/all/loss", "evaluation loss", "#e45756"),
)
"""Metrics that are drawn where a run has them, with label and colour."""

_WIDTH, _HEIGHT = 360, 110


def run_html(folder: Path, status: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A table with the facts of a run, and its curve; `records` are its metrics."""
    last = records[-1]["step"] if records else 0
    curves = [(label, colour, points_of(records, name)) for name, label, colour in _CURVES]
    curves = [curve for curve in curves if curve[2]]
    rows = {"folder": relative_to_cwd(folder), "status": f"{status}, step {last}"}
    for label, _, points in curves:
        (first, before), (end, after) = points[0], points[-1]
        rows[label] = f"{after:.3f} at step {end:g}" if first == end else f"{before:.3f} → {after:.3f}"
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{cells}</table>{_svg(curves)}"


def relative_to_cwd(folder: Path) -> str:
    """The path, relative to the working directory if it is below that."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def points_of(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """(step, value) of a metric, where it was recorded."""
    return [(record["step"], record[name]) for record in records if isinstance(record.get(name), int | float)]


def _svg(curves: Sequence[tuple[str, str, Points]]) -> str:
    """The curves in one picture, with a common scale; empty if none has two points."""
    points = [point for _, _, line in curves for point in line]
    if all(len(line) < 2 for _, _, line in curves):
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    lines = []
    for _, colour, line in curves:
        coordinates = " ".join(
            f"{_WIDTH * (x - left) / (right - left or 1):.1f},{_HEIGHT - _HEIGHT * (y - low) / (high - low or 1):.1f}"
            for x, y in line
        )
        lines.append(f'<polyline points="{coordinates}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    named = ", ".join(f'<span style="color:{colour}">{escape(label)}</span>' for label, colour, _ in curves)
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="-4 -4 {_WIDTH + 8} {_HEIGHT + 8}" role="img">'
        f"{''.join(lines)}</svg><div>{named}: {low:.3g} to {high:.3g}, steps {left:g} to {right:g}</div>"
    )
