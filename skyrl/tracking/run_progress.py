"""The progress of a run, read from its folder by the live panel and by `skyrl watch`.

metrics.jsonl     a line for each step: the first look reads the end, each later one continues where the last one ended
progress.json     current activity of the run, replaced every second: `skyrl.runs.progress_file`
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs

from skyrl.processes.orphans import lives
from skyrl.storage.json_files import complete_lines, parsed, record_of
from skyrl.tree.files import stored_text

FILE = "progress.json"
"""Name of the file in the run's folder."""

SESSIONS = "sessions.jsonl"
"""Name of the file with the starts of a run."""

GONE = "gone"
"""State of a run whose process has ended without a report: it was killed, or its own code ended it."""

_LARGEST = 1e300
_SHOWN = 60
"""Number of steps whose rewards are kept."""

_TAIL = 4 << 20
"""Bytes at the end of the metrics that the first look reads: a thousand steps, the last evaluation among them."""

_WHOLE = "timing/step"
BESIDE_STEPS = ("timing/eval", "timing/save_checkpoints")
"""Times that are measured outside of a step's own time."""


@attrs.frozen(kw_only=True)
class Now:
    """Content of `progress.json`."""

    state: str = "running"
    """State of the run: running, finished, stopped, failed, or `GONE`."""

    process: str = ""
    """`process_id` of the command; empty in runs of earlier versions."""

    host: str = ""

    name: str = ""
    total_steps: int = 0
    first_step: int = 0
    """Step that the session started from."""

    waits: tuple[tuple[str, float], ...] = ()
    """Phases and calls in progress, each with its seconds so far, the oldest first."""

    details: str = ""
    warning: str = ""
    memory_bytes: int = 0
    """Resident memory of the command's process, without its workers."""

    @classmethod
    def read(cls, text: str) -> Now:
        """Parse the text of `progress.json`. Raises `ValueError` if it is malformed."""
        plain = parsed(text)
        if not isinstance(plain, dict):
            raise ValueError(f"{FILE} is no table")
        types = {field.name: type(field.default) for field in attrs.fields(cls)}
        known = {name: value for name, value in plain.items() if name in types and name != "waits"}
        waits = [*plain.get("waits", ())]
        numbers = [value for name, value in known.items() if types[name] is int] + [seconds for _, seconds in waits]
        if any(type(value) is not types[name] for name, value in known.items()) or not all(map(_is_usual, numbers)):
            raise ValueError(f"{FILE} has a value that no run writes")
        return cls(waits=tuple((str(name), float(seconds)) for name, seconds in waits), **known)


def now_in(folder: Path) -> Now | None:
    """Activity of the run in this folder, `GONE` if its process has ended without a report; None before it wrote
    that.
    """
    try:
        for _ in range(2):  # again if its process is gone: it may have ended properly after the first look
            now = Now.read(stored_text(folder / FILE))
            is_here = bool(now.process) and now.host == socket.gethostname()
            if now.state != "running" or not is_here or lives(now.process):
                return now
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # not written yet, or damaged
        return None
    return attrs.evolve(now, state=GONE)


class RunProgress:
    """Progress of a run, read from the files in its folder. `look` reads what was written since the last call."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._metrics, self._clock = folder, folder / "metrics.jsonl", clock
        self._place, self._inode, self._changed = 0, 0, clock()
        self.now = Now()
        self.on_step: Callable[[], None] = lambda: None
        """Called after each new record of the metrics is read."""
        self._forget()

    def _forget(self) -> None:
        """Discard everything that was read from the metrics."""
        self._place = 0
        self.last: dict[str, Any] = {}
        """Metrics of the last step."""
        self.rewards: deque[float] = deque(maxlen=_SHOWN)
        self._seconds: deque[tuple[int, float]] = deque(maxlen=_SHOWN)
        self.evaluation: tuple[int, float] | None = None
        """Step and score of the last evaluation."""

    def look(self) -> bool:
        """Read what was written since the last call; returns whether there was anything new."""
        before = self._place, self.now
        self.now = now_in(self._folder) or self.now
        self._read_metrics()
        if (self._place, self.now) != before:
            self._changed = self._clock()
            return True
        return False

    @property
    def silent_for(self) -> float:
        """Seconds since something new was read."""
        return self._clock() - self._changed

    @property
    def step(self) -> int:
        """The last step that was recorded."""
        return int(self.last.get("step", 0))

    @property
    def state(self) -> str:
        """State of the run in words, with the step that it had reached if its process is gone."""
        at = f": its process ended without a word, at step {self.step} of {self.now.total_steps}; the run is unfinished"
        return self.now.state + (at if self.now.state == GONE else "")

    @property
    def has_failed(self) -> bool:
        """Whether the run ended and is unfinished, and nobody asked it to stop: it failed, or its process is gone."""
        return self.now.state in ("failed", GONE)

    @property
    def seconds_left(self) -> float | None:
        """Estimate from this session's steps, without its first, which warms up; None before there is such a step."""
        timed = [seconds for step, seconds in self._seconds if step > self.now.first_step + 1]
        return fmean(timed) * max(0, self.now.total_steps - self.step) if timed else None

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds of each phase of the last step."""
        outside = (_WHOLE, *BESIDE_STEPS, "timing/all_steps")
        timings = {
            name: value for name, value in self.last.items() if name.startswith("timing/") and name not in outside
        }
        return {name.removeprefix("timing/"): float(value) for name, value in timings.items()}

    def _read_metrics(self) -> None:
        """Read the new complete lines; of a file that is new or was replaced, as by a resumed run, those at its end."""
        try:
            with self._metrics.open("rb") as lines:
                size = lines.seek(0, 2)
                inode = self._metrics.stat().st_ino
                if size < self._place or inode != self._inode:
                    self._forget()
                    self._inode = inode
                    if size > _TAIL:  # go on from the first line that begins among the last bytes
                        lines.seek(size - _TAIL - 1)
                        lines.readline()
                        self._place = lines.tell()
                lines.seek(self._place)
                for line in complete_lines(lines):
                    self._place += len(line)
                    record = record_of(line)
                    if record is not None:
                        self._saw(record)
        except OSError:
            return

    def _saw(self, record: Mapping[str, Any]) -> None:
        self.last = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and _is_usual(value)
        }
        reward = self.last.get("reward/avg_raw_reward", self.last.get("train/loss"))
        if reward is not None:
            self.rewards.append(float(reward))
        for name in ("eval/all/avg_score", "eval/all/loss"):
            if name in self.last:
                self.evaluation = self.step, float(self.last[name])
        if _WHOLE in self.last:
            seconds = sum(float(self.last.get(name, 0.0)) for name in (_WHOLE, *BESIDE_STEPS))
            self._seconds.append((self.step, seconds))
        self.on_step()


def _is_usual(value: float) -> bool:
    """Whether a number can be computed with and shown; a file may hold infinity, or more digits than a float takes."""
    return -_LARGEST < value < _LARGEST


def step_line(step: int, total: int, metrics: Mapping[str, float], seconds_left: float | None) -> str:
    """A step in one line: reward or loss, speed, time left, and evaluation, as far as they are known."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for name, label in (("reward/avg_raw_reward", "reward"), ("train/loss", "loss")):
        parts += [f"{label} {metrics[name]:.3f}"] if name in metrics else []
    if "trainer/tokens_per_second" in metrics:
        parts.append(f"{metrics['trainer/tokens_per_second']:,.0f} tokens/s")
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    for name, label in (("eval/all/avg_score", "evaluation"), ("eval/all/loss", "evaluation loss")):
        parts += [f"{label} {metrics[name]:.3f}"] if name in metrics else []
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """The duration as text: `2:05`, or `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
