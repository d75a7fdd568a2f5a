"""The contract of tracking services, and what they are told of a run.

A service is fed from the run's folder by a process of its own (`follow.py`), live or after the run (`skyrl track`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import attrs
import cattrs

from skyrl.config.tracker_settings import TrackersConfig


@attrs.frozen(kw_only=True)
class ServiceRun:
    """One run, as one service is to show it."""

    service: str
    """Name in `skyrl.config.trackers.TRACKERS`."""

    project: str
    name: str
    folder: Path
    """The run's folder, absolute."""

    evaluations: Path
    """Folder of the evaluated samples, which need not be there."""

    settings: TrackersConfig
    first_step: int | None = None
    """Step that a live session starts from: later ones are about to be written again. None in a replay."""

    def to_line(self) -> bytes:
        """The run as a line of JSON, for the process that feeds the service."""
        plain = attrs.asdict(self, value_serializer=lambda _, __, each: str(each) if isinstance(each, Path) else each)
        return json.dumps(plain).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """The run that `to_line` wrote."""
        converter = cattrs.Converter()
        converter.register_structure_hook(Path, lambda value, _: Path(value))
        return converter.structure(json.loads(line), cls)

    @property
    def state_file(self) -> Path:
        """File with what is known of the run in this service."""
        return self.folder / "trackers" / f"{self.service}.json"


@attrs.frozen(kw_only=True)
class OfflineSession:
    """Files that one session of an offline service wrote."""

    path: str
    after: int
    """Last step that earlier sessions hold."""

    step: int
    """Last step that this one holds."""

    is_closed: bool = False
    """False where the session was killed, so that the end of its files may be missing."""


@attrs.frozen(kw_only=True)
class Known:
    """Id and progress of the run in a service, kept in the run's folder."""

    id: str | None = None
    step: int = -1
    """Last step that was delivered; -1: none."""

    sessions: tuple[OfflineSession, ...] = ()
    lost: tuple[str, ...] = ()
    """Ranges of steps, such as `6-7`, that the service keeps as a killed session had them: the run then resumed before
    them, and the service cannot take them back."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Content of the file; nothing is known where there is none, or a damaged one."""
        try:
            return cattrs.structure(json.loads(path.read_text(encoding="utf-8")), cls)
        except (OSError, ValueError, cattrs.BaseValidationError):
            return cls()

    def write(self, path: Path) -> None:
        """Replace the file at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(attrs.asdict(self), indent=1) + "\n", encoding="utf-8")
        scratch.replace(path)


@attrs.frozen(kw_only=True)
class Table:
    """Rows that belong to a step."""

    name: str
    """Such as `samples`, or `evaluation/gsm8k`."""

    step: int
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]

    def as_markdown(self) -> str:
        """The table for services that show text."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


class Service(Protocol):
    """One run in one tracking service. What its methods raise ends the process that calls them, never the run."""

    known: Known
    """Progress of the run in it: read by whoever feeds it, and kept in the run's folder after each step."""

    @classmethod
    def of_run(cls, run: ServiceRun, known: Known) -> Service:
        """Open the run in the service: the one that is known, or a new one."""

    def describe(self, stored: Mapping[str, Any]) -> None:
        """Show the run's configuration: `config.json` of its folder, without secrets."""

    def rewind(self, step: int) -> bool:
        """Forget what came after a step. False, and nothing happens, where the service cannot."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, which is later than all before."""

    def table(self, table: Table) -> None:
        """Rows of a step that may be earlier than the last one logged."""

    def close(self) -> None:
        """Everything is in its place when this returns."""


def _cell(value: object) -> str:
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("\n", "<br>")
