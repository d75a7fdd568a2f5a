"""Files of JSON lines that survive a restart: metrics of each step, and sampled trajectories."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from skyrl.processes.redaction import redacted_tree
from skyrl.storage.atomic import write_file
from skyrl.storage.json_files import lines_with_records, records_of
from skyrl.trajectory import Trajectory, TrajectoryGroup

_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def json_line(record: Mapping[str, Any]) -> str:
    """The record as one line, newline included. The line contains no other character that `str.splitlines` treats as a
    line end.
    """
    line = json.dumps(record, ensure_ascii=False, allow_nan=False)
    if any(end in line for end in _LINE_ENDS):  # few lines have one, and replacing scans every character
        line = line.translate({ord(end): escape for end, escape in _LINE_ENDS.items()})
    return line + "\n"


class JsonLines:
    """A file of JSON objects one per line, with secrets masked, each flushed when it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        self.extend([record])

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each record, each flushed before the next is made."""
        with self._path.open("a", encoding="utf-8", buffering=1) as lines:
            for record in records:
                lines.write(json_line(redacted_tree(record)))

    def read(self) -> Iterator[dict[str, Any]]:
        """Every complete line; one that is damaged or was cut short by a kill is left out."""
        return records_of(self._path)

    def forget_after(self, step: int) -> Counter[int]:
        """Drop the records of later steps, which a run that resumes from `step` will write again.

        Returns the number of records of each step.
        """
        if not self._path.exists():
            return Counter()
        kept = [(line, record["step"]) for line, record in lines_with_records(self._path) if record["step"] <= step]
        write_file(self._path, b"".join(line for line, _ in kept))
        return Counter(item for _, item in kept)


class MetricsFile:
    """A tracker that keeps `metrics.jsonl`: `{"step": 3, "reward/avg_raw_reward": 0.41, ...}`."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.append({"step": step, **metrics})

    def close(self) -> None:
        """Does nothing: no file is held open."""


def sample_records(
    step: int, groups: Sequence[TrajectoryGroup], decode: Callable[[Sequence[int]], str]
) -> Iterator[dict[str, Any]]:
    """The record of each trajectory; see `sample_record`."""
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            yield sample_record(step, number, group, trajectory, decode)


def sample_record(
    step: int, number: int, group: TrajectoryGroup, trajectory: Trajectory, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """A trajectory as a record: prompt, the row's other columns, answer, reward, and why sampling ended or why it was
    not judged.

    `number` is the index of the group in the step; `decode` turns token ids into text.
    """
    from skyrl.tracking.row_columns import kept_columns  # here: who reads records needs no environments

    earlier = [{"response": decode(s.response_ids), "response_ids": [*s.response_ids]} for s in trajectory.earlier]
    turns = [turn for token_row in trajectory.token_rows for turn in token_row.rewards]
    metrics = {name: _number(value) for name, value in trajectory.metrics.items()}
    return {
        "step": step,
        "group": number,
        "source": group.prompt.data_source,
        "prompt_id": group.prompt.id,
        "sample": trajectory.sample_index,
        "prompt": [dict(message) for message in group.prompt.messages],
        **kept_columns(group.prompt.extras),
        "response": decode(trajectory.response_ids),
        "reward": _number(trajectory.reward),
        **({"components": dict(trajectory.components)} if trajectory.components else {}),
        "stop_reason": trajectory.stop_reason,
        "response_ids": list(trajectory.response_ids),
        "weight_version": max(trajectory.weight_versions, default=None),
        **({"turn_rewards": [_number(turn.reward) for turn in turns]} if len(turns) > 1 else {}),
        **({"metrics": metrics} if metrics else {}),
        **({"earlier": earlier} if earlier else {}),
        **({"failures": [failure.reason for failure in trajectory.failures]} if trajectory.failures else {}),
        **({"skipped": trajectory.skipped} if trajectory.skipped else {}),
    }


_FORM: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("group", "sample"), lambda value: type(value) is int and abs(value) < 2**53),
    **dict.fromkeys(("prompt", "earlier"), lambda value: _is_list_of(value, dict)),
    **dict.fromkeys(("response_ids", "failures"), lambda value: _is_list_of(value, object)),
    **dict.fromkeys(
        ("components", "metrics"), lambda value: isinstance(value, dict) and all(map(_is_number, value.values()))
    ),
    "turn_rewards": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "reward": lambda value: _is_number(value),
    **dict.fromkeys(("prompt_id", "response", "stop_reason", "source"), lambda value: isinstance(value, str)),
}
"""Fields of a sample's record -> whether a value has the field's type, as far as readers rely on it."""

_MISSING: Mapping[str, Any] = {
    "prompt_id": "",
    "sample": 0,
    "response": "",
    "reward": None,
    "stop_reason": "",
    "weight_version": None,
}
"""What readers take for the fields that a line does not have."""


def sample_of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a sample as it was read, with every field that readers rely on; None if one has another type, as in
    a damaged file.
    """
    rows = [{**_MISSING, **record}]
    if _has_the_form(rows[0]):
        rows += [{"response": "", **row} for row in record.get("earlier", ())]
    if not all(map(_has_the_form, rows)):
        return None
    return {**rows[0], "earlier": rows[1:]} if rows[1:] else rows[0]


def _has_the_form(record: Mapping[str, object]) -> bool:
    return all(has_type(record[name]) for name, has_type in _FORM.items() if name in record)


def _is_number(value: object) -> bool:
    """Whether readers can show the value; NaN and infinity are text, and a file may hold more digits than a float."""
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and -1e300 < value < 1e300)


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _number(value: float) -> float | str:
    """The number; NaN and infinity as text, because JSON has no form for them."""
    return value if isfinite(value) else str(value)
