"""The run as a person watches it: one live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Self, TextIO

from skyrl.tracking.tracker import TrackedRun


class Console:
    """A tracker that shows progress: steps, reward, evaluation, tokens per second, time left."""

    def __init__(self, total_steps: int, first_step: int = 0, stream: TextIO | None = None) -> None:
        """`first_step` is the step a resumed run starts from: the time left is judged by this session's steps alone."""
        self._total = total_steps
        self._first = first_step
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._live = _LiveLine(total_steps, first_step) if self._stream.isatty() else None

    @classmethod
    def of_run(cls, run: TrackedRun) -> Self:
        """The tracker of a run, on standard error."""
        return cls(run.total_steps, run.first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        text = self._describe(step, metrics)
        if self._live is None or metrics.keys() & {"eval/all/avg_score", "eval/all/loss"}:
            self._say(text)
        if self._live is not None:
            self._live.show(step, text)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def _describe(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        if "reward/avg_raw_reward" in metrics:
            parts.append(f"reward {metrics['reward/avg_raw_reward']:.3f}")
        if "train/loss" in metrics:
            parts.append(f"loss {metrics['train/loss']:.3f}")
        if "trainer/tokens_per_second" in metrics:
            parts.append(f"{metrics['trainer/tokens_per_second']:,.0f} tokens/s")
        if step > self._first:
            left = (time.monotonic() - self._started) / (step - self._first) * (self._total - step)
            parts.append(f"{_clock(left)} left")
        if "eval/all/avg_score" in metrics:
            parts.append(f"evaluation {metrics['eval/all/avg_score']:.3f}")
        if "eval/all/loss" in metrics:
            parts.append(f"evaluation loss {metrics['eval/all/loss']:.3f}")
        return "  ".join(parts)


class _LiveLine:
    """A progress bar that stays at the bottom of the terminal."""

    def __init__(self, total: int, first: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn

        console = RichConsole(stderr=True)
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # output that goes to a file stays there
        )
        self._task = self._progress.add_task("starting", total=total, completed=first)
        self._progress.start()

    def show(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, description=text)

    def print(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
