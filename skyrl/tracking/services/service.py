"""The interface of tracking services, and the data of a run that they receive.

A separate process (`follow.py`) feeds each service from the run's folder, live or after the run (`skyrl track`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import attrs
import cattrs

from skyrl.config.settings.tracker_settings import TrackersConfig
from skyrl.storage.atomic import write_file
from skyrl.tree.files import stored_text


@attrs.frozen(kw_only=True)
class ServiceRun:
    """One run, as described to one service."""

    service: str
    """Name of the service in `skyrl.config.settings.trackers.TRACKERS`."""

    project: str
    name: str
    folder: Path
    """The run's folder, absolute."""

    evaluations: Path
    """Folder of the evaluated samples; it may not exist."""

    settings: TrackersConfig
    first_step: int | None = None
    """Step that a live session starts from: later steps will be written again. None in a replay."""

    def to_line(self) -> bytes:
        """The run as a line of JSON, for the process that feeds the service."""
        plain = attrs.asdict(
            self, value_serializer=lambda _, __, value: str(value) if isinstance(value, Path) else value
        )
        return json.dumps(plain).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Parse a line that `to_line` wrote."""
        converter = cattrs.Converter()
        converter.register_structure_hook(Path, lambda value, _: Path(value))
        return converter.structure(json.loads(line), cls)

    @property
    def state_file(self) -> Path:
        """File with the progress of the run in this service."""
        return self.folder / "trackers" / f"{self.service}.json"


@attrs.frozen(kw_only=True)
class OfflineSession:
    """Files that one session of an offline service wrote."""

    path: str
    after: int
    """Last step of the earlier sessions."""

    step: int
    """Last step of this session."""

    is_closed: bool = False
    """False if the session was killed, so that the end of its files may be missing."""


@attrs.frozen(kw_only=True)
class Known:
    """Id and progress of the run in a service, kept in the run's folder."""

    id: str | None = None
    step: int = -1
    """Last step that was delivered; -1 if none was."""

    sessions: tuple[OfflineSession, ...] = ()
    lost: tuple[str, ...] = ()
    """Ranges of steps, such as `6-7`, for which the service keeps the values of a killed session: the run resumed
    before them, and the service cannot replace them."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; the default values if it is missing or damaged."""
        try:
            return cattrs.structure(json.loads(stored_text(path)), cls)
        except (OSError, ValueError, cattrs.BaseValidationError):
            return cls()

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(attrs.asdict(self), indent=1) + "\n", durable=False)


# Services that stay offline (W&B, SwanLab) write a new folder in each session of a run. Both keep the end of their
# files in memory until they are closed, so a killed session may lack steps that were logged, and neither can delete a
# step. Everything can be delivered again from `metrics.jsonl`, so folders that were not closed, or that hold steps that
# will be repeated, are deleted unless they were synced.


def resumable(known: Known, first_step: int | None) -> Known:
    """Delete the folders whose steps have to be delivered again, and return the new state. These are all folders from
    the first one that was not closed, or that holds steps after `first_step` (None: the run does not go back).
    """
    for number, session in enumerate(known.sessions):
        folder = Path(session.path)
        is_sound = session.is_closed and folder.is_dir() and (first_step is None or session.step <= first_step)
        if not is_sound and not any(folder.glob("*.synced")):
            for item in known.sessions[number:]:
                shutil.rmtree(item.path, ignore_errors=True)
            return attrs.evolve(known, step=session.after, sessions=known.sessions[:number])
    return known


def opened(known: Known, folder: str) -> Known:
    """The state after a new session has started to write into `folder`."""
    session = OfflineSession(path=folder, after=known.step, step=known.step)
    return attrs.evolve(known, sessions=(*known.sessions, session))


def closed(known: Known) -> Known:
    """The state after the last session's files were closed."""
    last = attrs.evolve(known.sessions[-1], step=known.step, is_closed=True)
    return attrs.evolve(known, sessions=(*known.sessions[:-1], last))


@attrs.frozen(kw_only=True)
class ServiceTable:
    """Rows that belong to a step."""

    name: str
    """Name of the table, such as `samples` or `evaluation/gsm8k`."""

    step: int
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]

    def as_markdown(self) -> str:
        """The table as Markdown, for services that show text."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


class Service(Protocol):
    """One run in one tracking service. An exception of its methods ends the process that calls them, never the run."""

    known: Known
    """Progress of the run in the service; the caller stores it in the run's folder after each step."""

    @classmethod
    def of_run(cls, run: ServiceRun, known: Known) -> Service:
        """Open the run in the service: the known run, or a new one."""

    def describe(self, stored: Mapping[str, Any]) -> None:
        """Show the run's configuration: `config.json` of its folder, without secrets."""

    def rewind(self, step: int) -> bool:
        """Delete everything after a step. Returns False, without change, if the service cannot do that: the default."""
        return False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step later than all before."""

    def table(self, table: ServiceTable) -> None:
        """Log a table, whose step may be earlier than the last one logged."""

    def close(self) -> None:
        """Finish: everything is stored in the service when this returns."""


def _cell(value: object) -> str:
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("\n", "<br>")
