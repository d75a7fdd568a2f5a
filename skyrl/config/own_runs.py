"""Whether a stored run is one's own, so that the code that it names need not be named again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from skyrl.config.code_digests import digests_of, stored_digests


def why_not_own(file: str, field: str, name: str) -> str:
    """Why the code `name` of a stored configuration is not run without being named again; empty if it is.

    It is run if the run was started in the working directory by the same user, and the code is what it was then: a
    stored configuration from elsewhere may name any code.
    """
    place = Path(file)
    if place.name != "config.json":
        return "it comes from a checkpoint, which may be from elsewhere"
    if not _was_started_here(place):
        return "the run was not started in this folder by you"
    recorded = {key: value for key, value in stored_digests(str(place.parent)).items() if key.startswith(f"{field}: ")}
    now = digests_of(field, name)
    if not recorded or not all(now.values()):
        return "what the code was is not recorded"
    changed = sorted(key for key in {*recorded, *now} if recorded.get(key) != now.get(key))
    return f"{changed[0].removeprefix(f'{field}: ')} has changed since the run" if changed else ""


def _was_started_here(file: Path) -> bool:
    """Whether the file is that of a run of this user in its own folder, which its `run_path` names from here."""
    try:
        stored: Any = json.loads(file.read_text(encoding="utf-8"))["config"]
        run_path = Path((stored.get("trainer") or stored)["run_path"]).expanduser()
        same = (file.parent.resolve(), file.stat().st_uid) == (run_path.resolve(), os.geteuid())
        return same and file.parent.resolve().is_relative_to(Path.cwd().resolve())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return False
