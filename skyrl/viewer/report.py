"""`skyrl report`: runs in one self-contained HTML file, for mail, archives and reviews.

The file contains Plotly and a content security policy that allows only its own two scripts, by their digests: no
network requests, and no scripts in the model's answers. `settings` compares the configurations of the runs.
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
from skyrl.storage.json_files import parsed, record_of
from skyrl.tracking.jsonlines import sample_of
from skyrl.tracking.services.run_files import flat
from skyrl.tree.files import stored_text
from skyrl.viewer.conversation import Message, answer_messages, expected_answer, last_prompt, prompt_messages
from skyrl.viewer.curves import charts, templates
from skyrl.viewer.panels import constants
from skyrl.viewer.rendering import environment
from skyrl.viewer.run_card import RunCard, RunEvent, events, run_card
from skyrl.viewer.run_metrics import RunMetrics
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


@frozen(kw_only=True)
class FieldRow:
    """One field of the configuration in every run."""

    path: str
    values: tuple[str, ...]
    """The value in each run, as JSON."""

    origins: tuple[str, ...]
    """For each run `default`, `derived`, or the place where the value was written, such as `run.toml:14`."""

    @property
    def differs(self) -> bool:
        """Whether the runs have different values."""
        return len(set(self.values)) > 1

    @property
    def is_place(self) -> bool:
        """Whether the field names the run or says where its files lie, which no two runs share."""
        name = self.path.rpartition(".")[2]
        return name in ("run_name", "run_path", "ckpt_path", "export_path", "log_path")

    @property
    def is_default(self) -> bool:
        """Whether every run uses the default."""
        return set(self.origins) == {"default"}


def settings(folders: Sequence[Path]) -> list[FieldRow]:
    """All fields of the runs in these folders, in the order of the tree. Raises `UserError` if a folder has no
    configuration.
    """
    stored = [_read_stored(folder) for folder in folders]
    leaves = [_leaves(item["config"]) for item in stored]
    derived = [set(_texts(entry.get("derived"))) for entry in stored]
    locations = [_table(element.get("places")) for element in stored]
    defaults = [_defaults(str(item["config"].get("kind", "rl"))) for item in stored]
    paths = dict.fromkeys(path for own in leaves for path in own)
    return [
        FieldRow(
            path=path,
            values=tuple(own.get(path, "") for own in leaves),
            origins=tuple(
                _origin(path, own, of_rules, default, written)
                for own, of_rules, default, written in zip(leaves, derived, defaults, locations, strict=True)
            ),
        )
        for path in paths
    ]


def _origin(
    path: str, own: Mapping[str, str], derived: set[str], default: Mapping[str, str], locations: Mapping[str, str]
) -> str:
    if any(path == rule or path.startswith(f"{rule}.") for rule in derived):
        return "derived"
    if path not in own:
        return "absent"
    around = (location for at, location in locations.items() if path == at or path.startswith(f"{at}."))
    return next(around, "default" if own[path] == default.get(path) else "written")


def _texts(paths: object) -> list[str]:
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


def _table(stored: object) -> dict[str, str]:
    """Places of values by path, longest path first; earlier versions stored none."""
    result = stored if isinstance(stored, dict) else {}
    return {path: str(result[path]) for path in sorted(result, key=len, reverse=True)}


def _read_stored(folder: Path) -> Mapping[str, Any]:
    try:
        stored = parsed(stored_text(folder / "config.json"))
        if isinstance(stored, dict) and isinstance(stored.get("config"), dict):
            return stored
    except OSError:
        raise UserError(f"{folder} is not the folder of a run: it contains no config.json") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}") from error
    raise UserError(f"{folder / 'config.json'} contains no configuration")


def _defaults(kind: str) -> Mapping[str, str]:
    """The default values of this version; none for an unknown kind of run."""
    import cattrs

    from skyrl.config.loading.kinds import KINDS, root_of

    return _leaves(cattrs.unstructure(root_of(kind)())) if kind in KINDS else {}


def _leaves(tree: Mapping[str, Any]) -> dict[str, str]:
    return {path: json.dumps(value, ensure_ascii=False, default=str) for path, value in flat(tree)}
