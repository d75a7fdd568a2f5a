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

_MODELS = "models"
_SILENT_SECONDS = 10.0


def folder_of(model_id: str, service: Path) -> Path:
    """The folder of a model in the folder of its service, with its metrics and trackers, as a run has one."""
    return service / _MODELS / model_id.replace(":", "-")


def model_folders(service: Path) -> list[Path]:
    """The folders of all models of a service, from the oldest one."""
    return sorted((service / _MODELS).glob("*"), key=lambda folder: folder.stat().st_mtime)


def service_status(folder: Path) -> Mapping[str, Any] | None:
    """The status of the service of this folder; None if the folder is not one of a training service."""
    try:
        status: Mapping[str, Any] = json.loads(stored_text(folder / SERVICE_STATUS))
    except (OSError, ValueError):
        return None
    return status


def silence(status: Mapping[str, Any]) -> str:
    """A sentence about a service that has written no status for a while; empty for one that works."""
    age = time.time() - status["time"]
    since = f" for {age:.0f} s" if status["time"] else ""
    return f"no sign of life{since}: the service has ended, or is stopped" if age > _SILENT_SECONDS else ""


def work_of(status: Mapping[str, Any]) -> str:
    """Present work of the service, in a line."""
    clients = len({item["client"] for item in status["models"]} | {entry["name"] for entry in status["clients"]})
    return (
        f"{len(status['models'])} models of {clients} clients in {status['sessions']} sessions, "
        f"{status['samplers']} snapshots; {status['requests_waiting']} requests wait, {status['samples_running']} "
        f"samples are drawn and {status['samples_waiting']} wait"
    )


def finished_of(status: Mapping[str, Any]) -> str:
    """Requests that the service has finished since its start, in a line."""
    finished = ", ".join(f"{count} {kind}" for kind, count in sorted(status["finished"].items())) or "nothing yet"
    return f"{finished} ({status['tokens']:,} tokens)"


def status_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """The status: a line for the service, one for each client that uses its quotas, and one for each model."""
    if silent := silence(status):
        yield silent
    yield f"{work_of(status)}; finished: {finished_of(status)}"
    for client in status["clients"]:
        if client["tokens"] or client["checkpoint_bytes"]:
            stored = client["checkpoint_bytes"] / 2**20
            yield f"  {client['name']}: {client['tokens']:,} tokens in flight, checkpoints of {stored:.1f} MiB"
    for model in status["models"]:
        size = "all weights" if model["rank"] is None else f"rank {model['rank']}"
        loss = "" if model["loss"] is None else f", loss {model['loss']:.4g}"
        did = f"{size}, {model['steps']} steps{loss}, {model['waiting']} requests wait"
        yield f"  {model['id']} of {model['client']}: {did}"
