"""Folders of services that stay offline: W&B and SwanLab write a new folder in each session of a run.

Both keep the end of their files in memory until they are closed, so a killed session may lack steps that were logged,
and neither can delete a step. Everything can be delivered again from `metrics.jsonl`, so folders that were not closed,
or that hold steps that will be repeated, are deleted unless they were synced.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs

from skyrl.tracking.services.service import Known, OfflineSession


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
