"""Watches a run by its folder until it ends: a live panel on a terminal, a line for each step anywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from skyrl.errors import UserError
from skyrl.tracking.panel import panel
from skyrl.tracking.run_progress import FILE, RunProgress, clock

LOOK_EVERY = 0.5
"""Seconds between two reads of the folder."""


class LivePanel:
    """The panel of a run at the bottom of the terminal, redrawn by a separate thread."""

    def __init__(self, folder: Path, *, redirect_stdout: bool) -> None:
        """`redirect_stdout`: lines printed to standard output appear above the panel."""
        self._run = RunProgress(folder)
        self.console = Console(stderr=True)
        self._live = Live(
            get_renderable=self._draw,
            console=self.console,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=redirect_stdout,
        )
        self._live.start(refresh=True)

    def _draw(self) -> Panel:
        self._run.look()
        return panel(self._run)

    def close(self) -> None:
        """Remove the panel."""
        self._live.stop()


def show(folder: Path) -> None:
    """Print the panel once, to standard output."""
    run = RunProgress(folder)
    run.look()
    _refuse_strange(folder)
    Console().print(panel(run))


def _refuse_strange(folder: Path) -> None:
    if not (folder / FILE).is_file():
        raise UserError(f"{folder} contains no {FILE}: it is not the folder of a run of this version")


def follow(folder: Path, say: Callable[[str], None], ended: threading.Event, *, look_every: float = LOOK_EVERY) -> str:
    """Report the last step and each new one through `say`, until the run has ended or `ended` is set. Returns the run's
    last state in words.

    Raises `UserError` if no run has written its progress into the folder.
    """
    run = RunProgress(folder)
    run.look()
    _refuse_strange(folder)
    if run.last:
        say(line(run))
    run.on_step = lambda: say(line(run))
    while run.now.state == "running" and not ended.wait(look_every):
        run.look()
    return run.state


def line(run: RunProgress) -> str:
    """The last step in one line."""
    last, total = run.last, run.now.total_steps
    parts = [f"step {run.step:>{len(str(total))}}/{total}"]
    for name, label in (("reward/avg_raw_reward", "reward"), ("train/loss", "loss")):
        parts += [f"{label} {last[name]:.3f}"] if name in last else []
    if "trainer/tokens_per_second" in last:
        parts.append(f"{last['trainer/tokens_per_second']:,.0f} tokens/s")
    if run.seconds_left is not None:
        parts.append(f"{clock(run.seconds_left)} left")
    for name, label in (("eval/all/avg_score", "evaluation"), ("eval/all/loss", "evaluation loss")):
        parts += [f"{label} {last[name]:.3f}"] if name in last else []
    return "  ".join(parts)
