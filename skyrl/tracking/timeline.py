"""The timeline of profiled steps: every phase, and every call to another process, on the clock of the command.

    timeline.jsonl    {"step": 3, "spans": [["generate", 0.0, 1.25], ["engine-0 in TorchEngine.generate", ...], ...]}

`chrome_trace` turns it into the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing show. Phases are one
track, and each process is another. Overlapping calls to one process are on separate lanes of its track.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from skyrl.processes.progress import Progress, Span
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tracking.tracker import Tracker

FILE = "timeline.jsonl"
"""Name of the file in the run's folder."""

_PHASES = "phases"
_AROUND = "step"


class Timeline(Tracker):
    """A `Tracker` that collects the spans of some steps and writes them when the step is recorded."""

    def __init__(self, lines: JsonLines, progress: Progress, steps: Collection[int], first_step: int) -> None:
        """`first_step` is the number of steps recorded before. If `steps` is empty, nothing is collected."""
        self._lines, self._steps, self._next = lines, frozenset(steps), first_step + 1
        self._spans: list[Span] = []
        if self._steps:
            progress.on_end = self._keep_span

    def _keep_span(self, span: Span) -> None:
        if self._next in self._steps:
            self._spans.append(span)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        spans, self._spans, self._next = self._spans, [], step + 1
        if step in self._steps and spans:
            begin = min(span.began for span in spans)
            rounded = [[span.target, round(span.began - begin, 6), round(span.ended - begin, 6)] for span in spans]
            self._lines.append({"step": step, "spans": rounded})


def chrome_trace(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The trace of `records`, lines of `timeline.jsonl`, in the trace event format. Times are in microseconds, and each
    step begins where the previous one in the file ends.
    """
    events: list[dict[str, Any]] = []
    offset, tracks = 0.0, _Tracks()
    for record in records:
        spans = sorted(_spans(record), key=lambda span: (span[1], -span[2]))
        for label, began, ended in spans:
            process, separator, call = label.partition(" in ")
            track, name = (process, call) if separator else (_PHASES, label)
            lane = tracks.lane(track, offset + began, offset + ended)
            events.append(
                {
                    "name": f"step {record['step']}" if label == _AROUND else name,
                    "ph": "X",
                    "ts": (offset + began) * 1e6,
                    "dur": (ended - began) * 1e6,
                    "pid": tracks.number(track),
                    "tid": lane,
                    "args": {"step": record["step"]},
                }
            )
        offset += max((ended for _, _, ended in spans), default=0.0)
    return {"traceEvents": [*tracks.names(), *events], "displayTimeUnit": "ms"}


def _spans(record: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """The spans of a record: what, begin and end; malformed ones, of a damaged file, are left out."""
    try:
        return [(str(label), float(began), float(ended)) for label, began, ended in record["spans"]]
    except (KeyError, TypeError, ValueError):
        return []


class _Tracks:
    """Numbers the tracks and assigns lanes such that no two spans of a lane overlap unless one contains the other."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[list[float]]] = {}

    def number(self, track: str) -> int:
        return list(self._lanes).index(track)

    def lane(self, track: str, began: float, ended: float) -> int:
        """The first lane on which the span fits: after spans that have ended, or, for phases, inside an open one."""
        lanes = self._lanes.setdefault(track, [])
        for number, ends in enumerate(lanes):
            while ends and ends[-1] <= began:
                ends.pop()
            if not ends or (track == _PHASES and ended <= ends[-1]):
                ends.append(ended)
                return number
        lanes.append([ended])
        return len(lanes) - 1

    def names(self) -> Iterator[dict[str, Any]]:
        for number, track in enumerate(self._lanes):
            yield {"name": "process_name", "ph": "M", "pid": number, "args": {"name": track}}
