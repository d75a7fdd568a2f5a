"""Progress of a run on the console: a live panel on a terminal, an output of the cell in a notebook, plain lines
anywhere else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from skyrl.tracking.run_progress import step_line
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
        self._live: LivePanel | None = None
        if folder is not None and self._stream.isatty():
            from skyrl.tracking.watching import LivePanel  # rich is slow to import, and only terminals need it

            self._live = LivePanel(folder, redirect_stdout=sys.stdout.isatty())  # not what is redirected to a file
        self._notebook = NotebookPanel(total_steps) if stream is None and is_notebook() else None

    @classmethod
    def of_run(cls, run: TrackedRun) -> Self:
        """The tracker of a run, on standard error."""
        return cls(run.total_steps, run.first_step, folder=run.folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        left = None
        if step > self._first:
            left = (time.monotonic() - self._started) / (step - self._first) * (self._total - step)
        text = step_line(step, self._total, metrics, left)
        is_evaluated = bool(metrics.keys() & {"eval/all/avg_score", "eval/all/loss"})
        if self._notebook is not None:
            self._notebook.show(step, text, keep=is_evaluated)
        elif self._live is None:
            print(text, file=self._stream, flush=True)
        elif is_evaluated:
            self._live.console.print(text, highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookPanel:
    """A bar, the line of the last step, and the lines of evaluations above it."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._evaluations: list[str] = []
        self._handle: Any = None
        """The output, as `IPython.display.display` gives it; None before the first step."""

    def show(self, step: int, text: str, *, keep: bool) -> None:
        """Show the line of a step; with `keep`, it stays when the next one comes."""
        from IPython.display import HTML, display

        if keep:
            self._evaluations.append(text)
        lines = self._evaluations if keep else [*self._evaluations, text]
        html = HTML(
            f'<progress value="{step}" max="{self._total}" style="width:40em"></progress>'
            f'<pre style="margin:0">{escape(chr(10).join(lines))}</pre>'
        )
        if self._handle is None:
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)
