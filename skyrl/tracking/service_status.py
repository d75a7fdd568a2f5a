"""The status of a training service, in a file of its folder, and as lines for people."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl.tree.files import stored_text

SERVICE_STATUS = "service.json"
"""Name of the file, which is written every second while the service runs."""

_SILENT_SECONDS = 10.0


def service_status(folder: Path) -> Mapping[str, Any] | None:
    """The status of the service of this folder; None if the folder is not one of a training service."""
    try:
        status: Mapping[str, Any] = json.loads(stored_text(folder / SERVICE_STATUS))
    except (OSError, ValueError):
        return None
    return status


def status_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """The status, a line for the service and one for each model."""
    models = status["models"]
    age = time.time() - status["time"]
    if age > _SILENT_SECONDS:
        yield f"no sign of life for {age:.0f} s: the service has ended, or is stopped"
    finished = ", ".join(f"{count} {kind}" for kind, count in sorted(status["finished"].items())) or "nothing yet"
    yield (
        f"{len(models)} models of {len({each['client'] for each in models})} clients in {status['sessions']} sessions, "
        f"{status['samplers']} snapshots; {status['requests_waiting']} requests wait, {status['samples_running']} "
        f"samples are drawn and {status['samples_waiting']} wait; finished: {finished} ({status['tokens']} tokens)"
    )
    for model in models:
        size = "all weights" if model["rank"] is None else f"rank {model['rank']}"
        loss = "" if model["loss"] is None else f", loss {model['loss']:.4g}"
        did = f"{size}, {model['steps']} steps{loss}, {model['waiting']} requests wait"
        yield f"  {model['id']} of {model['client']}: {did}"
