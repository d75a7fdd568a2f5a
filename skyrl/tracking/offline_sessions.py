"""Folders of services that stay offline: W&B and SwanLab write a new one in each session of a run.

Both keep the end of their files in memory until they are closed, so that a killed session may lack steps that were
given to it; and neither can take back a step. All of it can be delivered again from `metrics.jsonl`: folders that were
not closed, or hold steps that come again, are deleted, unless they were synced.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs

from skyrl.tracking.service import Known, OfflineSession


def resumable(known: Known, first_step: int | None) -> Known:
    """The state once the folders are deleted whose steps have to be delivered again: all from the first one on that
    was not closed, or that holds steps after `first_step` (None: the run does not go back).
    """
    for number, session in enumerate(known.sessions):
        folder = Path(session.path)
        is_sound = session.is_closed and folder.is_dir() and (first_step is None or session.step <= first_step)
        if not is_sound and not _is_synced(folder):
            for each in known.sessions[number:]:
                shutil.rmtree(each.path, ignore_errors=True)
            return attrs.evolve(known, step=session.after, sessions=known.sessions[:number])
    return known


def opened(known: Known, folder: str) -> Known:
    """The state once a new session writes into the folder."""
    session = OfflineSession(path=folder, after=known.step, step=known.step)
    return attrs.evolve(known, sessions=(*known.sessions, session))


def closed(known: Known) -> Known:
    """The state once the last session's files are complete."""
    last = attrs.evolve(known.sessions[-1], step=known.step, is_closed=True)
    return attrs.evolve(known, sessions=(*known.sessions[:-1], last))


def _is_synced(folder: Path) -> bool:
    return any(folder.glob("*.synced"))
