"""The reward curve of a run, as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skyrl.storage.atomic import atomic_file


def draw_reward_curve(records: Iterable[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw reward and evaluation score over steps into a PNG, from the records of `metrics.jsonl`."""
    from matplotlib.figure import Figure

    rows = list(records)
    figure = Figure(figsize=(7, 4), dpi=120)
    figure.subplots_adjust(left=0.13, right=0.97, bottom=0.13, top=0.91)  # tight_layout would draw everything twice
    axes = figure.subplots()
    for name, label, style in (
        ("reward/avg_raw_reward", "reward of sampled answers", "-"),
        ("eval/all/avg_score", "evaluation", "o--"),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="reward")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    with atomic_file(path, durable=False) as scratch:
        figure.savefig(scratch, format="png")
