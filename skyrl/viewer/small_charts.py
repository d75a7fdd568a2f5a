"""Charts of a run as SVG, for pages that are drawn anew whenever the run has written more, without script or style."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor, log10
from xml.etree.ElementTree import Element, SubElement, tostring

from attrs import frozen

from skyrl.viewer.panels import BYTES, Panel

MOST_POINTS = 300
"""Largest number of points of a line, which is wider than the screen of most."""

_WIDTH, _HEIGHT, _TOP = 320.0, 110.0, 6.0


@frozen(kw_only=True)
class SmallChart:
    """A chart as SVG, and the texts around it."""

    panel: Panel
    svg: str
    least: str
    """Lowest value of the axis."""

    most: str
    first: int
    """First step."""

    last: int
    ends: tuple[tuple[int, str, str], ...]
    """For each line its number, its label, and its last value."""


def small_charts(panels: Sequence[Panel]) -> Iterator[SmallChart]:
    """A chart for each panel; all have the same steps."""
    lines = [line.series for panel in panels for line in panel.lines]
    first, last = (min(s.steps[0] for s in lines), max(s.steps[-1] for s in lines)) if lines else (0, 0)
    for panel in panels:
        least = min(min(line.series.lows) for line in panel.lines)
        most = max(max(line.series.highs) for line in panel.lines)
        yield SmallChart(
            panel=panel,
            svg=_draw(panel, first, last, least, most),
            least=_value_text(least, panel),
            most=_value_text(most, panel),
            first=first,
            last=last,
            ends=tuple(
                (number, line.label or line.run, _value_text(line.series.values[-1], panel))
                for number, line in enumerate(panel.lines)
            ),
        )


def short(value: float) -> str:
    """The number with three significant digits: `0.412`, `12,300`, `2e-06`."""
    if value == 0 or not -5 < floor(log10(abs(value))) < 9:
        return f"{value:.3g}"
    return f"{value:,.{max(0, 2 - floor(log10(abs(value))))}f}"


def _value_text(value: float, panel: Panel) -> str:
    return f"{short(value / 2**20)} MiB" if panel.unit == BYTES else short(value)


def _draw(panel: Panel, first: int, last: int, least: float, most: float) -> str:
    root = Element("svg", {"viewBox": f"0 0 {_WIDTH:g} {_HEIGHT:g}", "preserveAspectRatio": "none", "role": "img"})
    ends = ", ".join(f"{line.label} {_value_text(line.series.values[-1], panel)}".strip() for line in panel.lines)
    root.set(
        "aria-label", f"{panel.title}: from {_value_text(least, panel)} to {_value_text(most, panel)}, last {ends}"
    )
    for height in (_TOP, _HEIGHT / 2, _HEIGHT - _TOP):
        SubElement(root, "path", {"class": "rule", "d": f"M0 {height:g}H{_WIDTH:g}"})
    for number, line in enumerate(panel.lines):
        thinned = line.series.thinned(MOST_POINTS)
        points = [
            (_position(step, first, last, 2.0, _WIDTH - 2), _position(value, least, most, _HEIGHT - _TOP, _TOP))
            for step, value in zip(thinned.steps, thinned.means, strict=True)
        ]
        # a line of one point has no length: a stroke with round ends shows it as a dot
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (points if len(points) > 1 else points * 2))
        SubElement(root, "path", {"class": f"line l{number % 8}", "d": path})
    return tostring(root, encoding="unicode")


def _position(value: float, least: float, most: float, low: float, high: float) -> float:
    """The place of a value on an axis from `low` to `high`; in its middle if all values are equal."""
    return low + (high - low) * ((value - least) / (most - least) if most > least else 0.5)
