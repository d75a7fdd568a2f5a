"""`skyrl report`: runs in one self-contained HTML file, for mail, archives and reviews.

The file contains Plotly and a content security policy that allows only its own two scripts, by their digests: no
network requests, and no scripts in the model's answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from skyrl.errors import UserError
from skyrl.storage.json_files import record_of
from skyrl.tracking.jsonlines import JsonLines
from skyrl.viewer.conversation import Message, prompt_messages
from skyrl.viewer.curves import Records, charts
from skyrl.viewer.run_events import RunEvent, events
from skyrl.viewer.settings import settings

LONGEST_TEXT = 4000
"""Largest number of characters of a message in a report."""


@frozen(kw_only=True)
class ReportedRun:
    """One run of a report."""

    name: str
    records: Records
    events: Sequence[RunEvent]
    samples: Sequence[tuple[Mapping[str, Any], Sequence[Message]]]
    """Records of samples, each with its prompt."""


def report(folders: Sequence[Path], *, samples: int, layouts: Mapping[Path, str] | None = None) -> str:
    """The HTML of these runs, with at most `samples` samples of each. `layouts` are SVG pictures of the runs' layouts,
    by folder. Raises `UserError` for a folder without metrics.
    """
    runs = [_read(folder, name, samples) for folder, name in zip(folders, _names(folders), strict=True)]
    figures = list(charts({run.name: run.records for run in runs}))
    scripts = {"plotly": get_plotlyjs(), "glue": Path(__file__).with_name("static").joinpath("report.js").read_text()}
    environment = Environment(
        loader=PackageLoader("skyrl.viewer"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html").render(
        title=", ".join(run.name for run in runs),
        policy=_policy(list(scripts.values())),
        scripts={name: Markup(text) for name, text in scripts.items()},
        charts=figures,
        figures=Markup(_as_data([json.loads(chart.figure) for chart in figures])),
        runs=runs,
        layouts=[Markup((layouts or {}).get(folder, "")) for folder in folders],
        settings=settings(folders),
        numbers=[_numbers(run.records) for run in runs],
        longest=LONGEST_TEXT,
    )


def _read(folder: Path, name: str, samples: int) -> ReportedRun:
    lines = JsonLines(folder / "metrics.jsonl")
    records = [line for line in lines.read() if isinstance(line.get("step"), int)]
    if not records:
        raise UserError(f"{folder} has nothing to report: metrics.jsonl is not there, or is empty")
    chosen = _spread(folder / "trajectories.jsonl", samples)
    return ReportedRun(
        name=name,
        records=records,
        events=events(folder, records),
        samples=[(record, prompt_messages(record)) for record in chosen],
    )


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
        wanted = {round(number * (total - 1) / max(count - 1, 1)) for number in range(count)}
        lines.seek(0)
        for number, line in enumerate(lines):
            record = record_of(line) if number in wanted and line.endswith(b"\n") else None
            if record is not None:
                yield record


def _numbers(records: Records) -> list[tuple[str, float, float, float, float]]:
    """Name, first, last, least and largest value of each metric."""
    values: dict[str, list[float]] = {}
    for line in records:
        for name, value in line.items():
            if name != "step" and isinstance(value, (int, float)):
                values.setdefault(name, []).append(value)
    return [(name, own[0], own[-1], min(own), max(own)) for name, own in values.items()]


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy that allows only these scripts. Inline styles are allowed because Plotly sets them."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _as_data(value: object) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
