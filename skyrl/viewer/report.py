"""`skyrl report`: runs in one self-contained HTML file, for mail, archives and reviews.

The file contains Plotly and a content security policy that allows only its own two scripts, by their digests: no
network requests, and no scripts in the model's answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from attrs import frozen
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from skyrl.errors import UserError
from skyrl.runs.stored_runs import runs_below
from skyrl.storage.json_files import record_of
from skyrl.tracking.jsonlines import sample_of
from skyrl.viewer.conversation import Message, answer_messages, expected_answer, last_prompt, prompt_messages
from skyrl.viewer.curves import charts, templates
from skyrl.viewer.panels import constants
from skyrl.viewer.rendering import environment
from skyrl.viewer.run_card import RunCard, run_card
from skyrl.viewer.run_events import RunEvent, events
from skyrl.viewer.run_metrics import RunMetrics
from skyrl.viewer.settings import settings
from skyrl.viewer.small_charts import short

LONGEST_TEXT = 4000
"""Largest number of characters of a message in a report."""


@frozen(kw_only=True)
class ReportedRun:
    """One run of a report."""

    name: str
    command: str
    """Command that shows all samples."""

    metrics: RunMetrics
    card: RunCard
    events: Sequence[RunEvent]
    samples: Sequence[ReportedSample]


@frozen(kw_only=True)
class ReportedSample:
    """A sample of a run, as a conversation."""

    record: Mapping[str, Any]
    question: str
    expected: str
    messages: Sequence[Message]


def report(
    folders: Sequence[Path],
    *,
    samples: int,
    layouts: Mapping[Path, str] | None = None,
    gpus: Mapping[Path, int] | None = None,
) -> str:
    """The HTML of these runs, with at most `samples` samples of each. `layouts` are SVG pictures of the runs' layouts,
    and `gpus` the numbers of their GPUs, by folder. Raises `UserError` for a folder without metrics.
    """
    named = zip(folders, _names(folders), strict=True)
    runs = [_read_run(folder, name, samples, (gpus or {}).get(folder)) for folder, name in named]
    series = {run.name: run.metrics.series for run in runs}
    figures = list(charts(series))
    static = Path(__file__).with_name("static")
    scripts = {"plotly": get_plotlyjs(), "glue": static.joinpath("report.js").read_text(encoding="utf-8")}
    fields = settings(folders)
    return (
        environment()
        .get_template("report.html")
        .render(
            title=", ".join(run.name for run in runs),
            policy=_policy(list(scripts.values())),
            style=Markup(static.joinpath("look.css").read_text(encoding="utf-8")),
            scripts={name: Markup(text) for name, text in scripts.items()},
            charts=[(section, list(own)) for section, own in groupby(figures, key=lambda chart: chart.section)],
            figures=Markup(_script_json({"figures": [chart.figure for chart in figures], "templates": templates()})),
            constants=[(name, short(value)) for name, value in constants(series)],
            runs=runs,
            layouts=[Markup((layouts or {}).get(folder, "")) for folder in folders],
            settings=fields,
            differences=[field for field in fields if field.differs and not field.is_place],
            places=[field for field in fields if field.differs and field.is_place],
            numbers=[_numbers(run.metrics) for run in runs],
            least=min(0.0, *(_reward(sample) for run in runs for sample in run.samples), 0.0),
            most=max(1.0, *(_reward(item) for run in runs for item in run.samples), 1.0),
            longest=LONGEST_TEXT,
        )
    )


def _read_run(folder: Path, name: str, samples: int, gpus: int | None) -> ReportedRun:
    metrics = RunMetrics(folder)
    while metrics.look():
        pass
    if not metrics.lines:
        hint = runs_below(folder, "skyrl report") or ", or is empty"
        raise UserError(f"{folder} has nothing to report: metrics.jsonl is not there{hint}")
    return ReportedRun(
        name=name,
        command=f"skyrl view {shlex.quote(str(folder))}",
        metrics=metrics,
        card=run_card(folder, name, metrics, gpus=gpus),
        events=events(folder, metrics.series),
        samples=[_sample(record) for record in _spread(folder / "trajectories.jsonl", samples)],
    )


def _sample(record: Mapping[str, Any]) -> ReportedSample:
    return ReportedSample(
        record=record,
        question=" ".join(last_prompt(record).split())[:120],
        expected=expected_answer(record)[:LONGEST_TEXT],
        messages=[*prompt_messages(record), *answer_messages(record)],
    )


def _reward(sample: ReportedSample) -> float:
    value = sample.record.get("reward")
    return float(value) if isinstance(value, int | float) and isfinite(value) else 0.0


def _names(folders: Sequence[Path]) -> list[str]:
    """Short names of the runs; whole paths if the names are not unique."""
    short = [folder.absolute().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _spread(file: Path, most: int) -> Iterator[dict[str, Any]]:
    """At most `most` lines of the file, evenly spaced from the first to the last; the others are not parsed."""
    if not file.is_file() or most < 1:
        return
    with file.open("rb") as lines:
        total = sum(1 for _ in lines)
        count = min(total, most)
        line_numbers = {round(number * (total - 1) / max(count - 1, 1)) for number in range(count)}
        lines.seek(0)
        for number, line in enumerate(lines):
            record = record_of(line) if number in line_numbers and line.endswith(b"\n") else None
            if record is not None and (sample := sample_of(record)) is not None:
                yield sample


def _numbers(metrics: RunMetrics) -> list[tuple[str, float, float, float, float]]:
    """Name, first, last, least and largest value of each metric."""
    own = metrics.series.items()
    return [(name, item.values[0], item.values[-1], min(item.lows), max(item.highs)) for name, item in own]


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy that allows only these scripts. Inline styles are allowed because Plotly sets them."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _script_json(value: object) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
