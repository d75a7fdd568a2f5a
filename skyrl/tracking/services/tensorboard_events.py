"""TensorBoard: event files, written with the package `tensorboard` only."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from skyrl.tracking.services.service import Known, ServiceRun, ServiceTable


class TensorBoardEvents:
    """Event files of one run, in one folder. Steps that are repeated after a resume replace the earlier ones, which
    readers drop (TensorBoard's `purge_orphaned_data`, on by default).
    """

    def __init__(self, folder: Path, known: Known, about: Mapping[str, object]) -> None:
        """`about` is shown as text with the configuration: notes, tags, group."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.known = attrs.evolve(known, id=known.id or folder.name)
        self._about = about
        self._has_tables_up_to = known.step
        self._writer = EventFileWriter(str(folder))
        self.rewind(self.known.step)  # drops events that a kill left without a record in `known`

    @classmethod
    def of_run(cls, run: ServiceRun, known: Known) -> Self:
        folder = Path(run.settings.tensorboard.path or run.folder / "tensorboard").expanduser().absolute()
        settings = run.settings
        about = {"notes": settings.notes, "tags": list(settings.tags), "group": settings.group}
        return cls(folder, known, {name: value for name, value in about.items() if value})

    def describe(self, stored: Mapping[str, Any]) -> None:
        configuration = {"about": self._about, **stored} if self._about else stored
        text = json.dumps(configuration, indent=1, ensure_ascii=False)
        self._text("configuration", max(self.known.step, 0), "\n".join(f"    {line}" for line in text.splitlines()))

    def rewind(self, step: int) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.add_event(
            Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START))
        )
        self.known = attrs.evolve(self.known, step=step)
        return True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def table(self, table: ServiceTable) -> None:
        if table.step > self._has_tables_up_to:  # readers drop only scalars
            self._text(table.name, table.step, table.as_markdown())

    def close(self) -> None:
        self._writer.close()

    def _text(self, name: str, step: int, markdown: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
        value = Summary.Value(tag=name, tensor=tensor, metadata=create_summary_metadata(name, ""))
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
        self._writer.flush()
