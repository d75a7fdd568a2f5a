"""Watches a run by its folder until it ends: a live panel on a terminal, a line for each step anywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from skyrl.errors import UserError
from skyrl.tracking.run_progress import FILE, RunProgress, clock, step_line

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
    Console().print(panel(_progress_in(folder)))


def progress_of(folder: Path) -> dict[str, object]:
    """State, step, planned steps, estimated seconds left and last metrics of a run. Raises `UserError`."""
    run = _progress_in(folder)
    return {
        "state": run.state,
        "step": run.step,
        "total_steps": run.now.total_steps,
        "seconds_left": run.seconds_left,
        "metrics": run.last,
    }


def has_failed(folder: Path) -> bool:
    """Whether the run failed, or its process is gone. Raises `UserError`."""
    return _progress_in(folder).has_failed


def _progress_in(folder: Path) -> RunProgress:
    run = RunProgress(folder)
    run.look()
    if not (folder / FILE).is_file():
        raise UserError(f"{folder} contains no {FILE}: it is not the folder of a run of this version")
    return run


def follow(folder: Path, say: Callable[[str], None], ended: threading.Event, *, look_every: float = LOOK_EVERY) -> str:
    """Report the last step and each new one through `say`, until the run has ended or `ended` is set. Returns the run's
    last state in words.

    Raises `UserError` if no run has written its progress into the folder.
    """
    run = _progress_in(folder)
    if run.last:
        say(line(run))
    run.on_step = lambda: say(line(run))
    while run.now.state == "running" and not ended.wait(look_every):
        run.look()
    return run.state


def line(run: RunProgress) -> str:
    """The last step in one line."""
    return step_line(run.step, run.now.total_steps, run.last, run.seconds_left)


_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 40
_QUIET_AFTER = 10.0
"""Seconds without new data after which the panel says so."""


def panel(run: RunProgress) -> Panel:
    """Progress of the run and of its step, reward, speed, engines, memory, and the last warning."""
    now = run.now
    title = f"{now.name or 'run'}: {run.state}"
    steps = Table.grid(Column(ratio=1), Column(no_wrap=True), padding=(0, 2), expand=True)
    left = run.seconds_left
    text = f"step {run.step}/{run.now.total_steps}"
    steps.add_row(
        ProgressBar(total=max(1, now.total_steps), completed=run.step),
        Text(text if left is None else f"{text}, {clock(left)} left"),
    )
    grid = Table.grid(padding=(0, 2))
    for name, value in _values(run):
        grid.add_row(Text(name, style="dim"), Text(value))
    parts: list[RenderableType] = [steps, grid]
    phases = _phases(run)
    parts += [phases] if phases is not None else []
    parts += [Text(line, style=style, overflow="fold") for line, style in _lines(run)]
    return Panel(Group(*parts), title=title, title_align="left")


def sparkline(values: Iterable[float]) -> str:
    """The values as bars from the smallest to the largest; equal values are low."""
    recent = list(values)[-_SPARKS:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in recent)


def _values(run: RunProgress) -> Iterator[tuple[str, str]]:
    last = run.last
    kind = "reward" if "reward/avg_raw_reward" in last else "loss"
    if run.rewards:
        yield kind, f"{run.rewards[-1]:.3f}  {sparkline(run.rewards)}"
    if run.evaluation is not None:
        yield "evaluation", f"{run.evaluation[1]:.3f} at step {run.evaluation[0]}"
    if "trainer/tokens_per_second" in last:
        yield "tokens/s", f"{last['trainer/tokens_per_second']:,.0f}"
    if "inference/engines_in_service" in last:
        lost = last.get("inference/engines_lost", 0)
        yield (
            "engines",
            f"{last['inference/engines_in_service']:.0f} in service" + (f", {lost:.0f} lost" if lost else ""),
        )
    if "async/staleness_mean" in last:
        yield "staleness", f"{last['async/staleness_mean']:.2f} steps, {last['async/staleness_max']:.0f} at most"
    if run.now.memory_bytes:
        yield "memory", f"{run.now.memory_bytes / 1e9:.1f} GB in this process"


def _phases(run: RunProgress) -> Table | None:
    """The phases of a step with their duration in the last step, and the running one highlighted."""
    seconds = run.phase_seconds
    open_now = {name: since for name, since in reversed(run.now.waits) if name != "step"}  # the oldest of each name
    names = list(dict.fromkeys([*seconds, *(name for name in open_now if " in " not in name)]))
    if not names:
        return None
    longest = max([*seconds.values(), 1e-9])
    grid = Table.grid(padding=(0, 2))
    for name in names:
        is_open = name in open_now
        took = f"{seconds[name]:.1f} s" if name in seconds else ""
        running = f"now for {open_now[name]:.0f} s" if is_open else ""
        bar = ProgressBar(total=longest, completed=seconds.get(name, 0.0), width=24)
        grid.add_row(Text(f"{'>' if is_open else ' '} {name}", style="bold" if is_open else "dim"), bar, took, running)
    return grid


def _lines(run: RunProgress) -> Iterator[tuple[str, str]]:
    if run.now.details:
        yield run.now.details, "dim"
    if run.now.warning:
        yield run.now.warning, "yellow"
    if run.now.state == "running" and run.silent_for > _QUIET_AFTER:
        yield f"no news for {clock(run.silent_for)}: the run is busy, or gone", "yellow"
