"""Reads a run's folder for trackers: metrics, samples and evaluations as they are written, and the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from skyrl.errors import UserError
from skyrl.storage.json_files import GrowingLines
from skyrl.tracking.jsonlines import sample_of
from skyrl.tracking.services.service import ServiceTable
from skyrl.tree.files import stored_text

COLUMNS = ("step", "prompt_id", "sample", "reward", "stop_reason", "prompt", "response")
"""Columns of tables of samples."""

LONGEST = 4_000
"""Largest number of characters of a text in a table."""


class SampleTables:
    """Tables of the samples of each step, from `trajectories.jsonl`."""

    def __init__(self, path: Path, rows: int) -> None:
        """`rows` is the largest number of rows of a table."""
        self._lines, self._size = GrowingLines(path), rows
        self._ahead: list[dict[str, Any]] = []  # at most one: the first record of a later step

    def before(self, step: float) -> Iterator[ServiceTable]:
        """Tables of the steps before `step` that were not returned yet; they are complete once `step` is logged. After
        the file is replaced, they are returned again.
        """
        tables: dict[int, list[Sequence[Any]]] = {}
        for record in filter(sample_of, self._records_before(step)) if self._size else ():
            rows = tables.setdefault(int(record["step"]), [])
            if len(rows) < self._size:
                rows.append(_row(record))
        for number, rows in sorted(tables.items()):
            yield ServiceTable(name="samples", step=number, columns=COLUMNS, rows=rows)

    def _records_before(self, step: float) -> Iterator[dict[str, Any]]:
        """New records before `step`; the first record of a later step is kept for the next call."""
        ahead, self._ahead = [] if self._lines.is_replaced else self._ahead, []
        for record in chain(ahead, self._lines.new()):
            if record["step"] >= step:
                self._ahead = [record]
                return
            yield record


def evaluation_tables(folder: Path, step: int, rows: int) -> Iterator[ServiceTable]:
    """A table for each data source that was evaluated after a step; `folder` contains all evaluations."""
    for file in sorted((folder / f"global_step_{step}_evals").glob("*.jsonl")) if rows else ():
        if file.stem == "aggregated_results":
            continue
        samples = filter(sample_of, GrowingLines(file, of_steps=False).new())
        records = list(islice(samples, rows))
        yield ServiceTable(
            name=f"evaluation/{unquote(file.stem)}", step=step, columns=COLUMNS, rows=[*map(_row, records)]
        )


def stored_configuration(folder: Path) -> dict[str, Any]:
    """`config.json` of the run's folder, which has secrets masked. Raises `UserError` if it cannot be read."""
    file = folder / "config.json"
    try:
        stored = json.loads(stored_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
        raise UserError(f"{file} contains no configuration")
    return stored


def derived_values(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the user left open and skyrl derived: dotted path -> value."""
    leaves = dict(flat(stored["config"]))
    return {path: leaves[path] for path in stored.get("derived", ()) if path in leaves}


def shown_configuration(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with everything else that `config.json` says, and the derived values, under `skyrl`."""
    about = {name: value for name, value in stored.items() if name not in ("config", "derived")}
    return {**stored["config"], "skyrl": about | {"derived": derived_values(stored)}}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths of the leaves of a tree of plain data, with their values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _row(record: Mapping[str, Any]) -> Sequence[Any]:
    prompt = "\n".join(f"{item.get('role')}: {item.get('content')}" for item in record.get("prompt", ()))
    texts = {"prompt": prompt, "response": record.get("response", "")}
    return [_short(str(texts[name])) if name in texts else record.get(name) for name in COLUMNS]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} letters)"
