"""Progress of a run in a notebook: one output of the cell, which is replaced after each step."""

from __future__ import annotations

import sys
from html import escape
from typing import Protocol


class DisplayHandle(Protocol):
    """An output of a cell, as `IPython.display.display` gives it."""

    def update(self, obj: object) -> None:
        """Replace the output."""


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookPanel:
    """A bar, the line of the last step, and the lines of evaluations above it."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._evaluations: list[str] = []
        self._handle: DisplayHandle | None = None

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
