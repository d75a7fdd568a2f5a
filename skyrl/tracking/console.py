"""Progress of a run on the console: a live panel on a terminal, an output of the cell in a notebook, plain lines
anywhere else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from skyrl.tracking.notebook import NotebookPanel, is_notebook
from skyrl.tracking.run_progress import clock
from skyrl.tracking.tracker import TrackedRun

if TYPE_CHECKING:
    from skyrl.tracking.watching import LivePanel


class Console:
    """A tracker that shows progress: steps, reward, evaluation, tokens per second, time left."""

    def __init__(
        self, total_steps: int, first_step: int = 0, stream: TextIO | None = None, folder: Path | None = None
    ) -> None:
        """`first_step` is the step a resumed run starts from: the time left is estimated from this session's steps
        only. `folder` is the run folder; on a terminal, a panel at the bottom shows its progress.
        """
        self._total = total_steps
        self._first = first_step
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._live = _live_panel(folder) if folder is not None and self._stream.isatty() else None
        self._notebook = NotebookPanel(total_steps) if stream is None and is_notebook() else None

    @classmethod
    def of_run(cls, run: TrackedRun) -> Self:
        """The tracker of a run, on standard error."""
        return cls(run.total_steps, run.first_step, folder=run.folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        text = self._describe(step, metrics)
        is_evaluated = bool(metrics.keys() & {"eval/all/avg_score", "eval/all/loss"})
        if self._notebook is not None:
            self._notebook.show(step, text, keep=is_evaluated)
        elif self._live is None or is_evaluated:
            self._say(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False)
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
            parts.append(f"{clock(left)} left")
        if "eval/all/avg_score" in metrics:
            parts.append(f"evaluation {metrics['eval/all/avg_score']:.3f}")
        if "eval/all/loss" in metrics:
            parts.append(f"evaluation loss {metrics['eval/all/loss']:.3f}")
        return "  ".join(parts)


def _live_panel(folder: Path) -> LivePanel:
    from skyrl.tracking.watching import LivePanel  # rich is slow to import, and only terminals need it

    return LivePanel(folder, redirect_stdout=sys.stdout.isatty())  # output redirected to a file stays there
