"""Start of a run: from the beginning or a checkpoint, or refused because something would be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from skyrl.checkpoint.store import Checkpoint, CheckpointStore, load_checkpoint
from skyrl.errors import ResumeError
from skyrl.runs.inputs import notice
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.run_lock import refuse_changed
from skyrl.runs.run_tree import AnyRun
from skyrl.tree import required


def find_start(run: AnyRun, store: CheckpointStore, folder: RunFolder, *, restarted: bool = False) -> Checkpoint | None:
    """The checkpoint that the configuration selects, or None for a start from the beginning.

    `restarted` is true if this command's own run has failed and is restarted. Raises `ResumeError` for a damaged
    checkpoint or one of another run, if a required checkpoint does not exist, and if a finished run or later
    checkpoints would be overwritten.
    """
    trainer = run.trainer
    result: Checkpoint | None = None
    match beginning(run, restarted=restarted):
        case "named":
            path = required(trainer.resume_path, run.trainer.path_of("resume_path"))
            result = load_checkpoint(path if "://" in path else Path(path).expanduser(), trainer.ckpt_verify)
            refuse_changed(result.config, run, path, run.trainer.path_of("resume_path"))
            if not restarted:
                _refuse_to_mix(run, store, result.step)
            elif any(step > result.step for step in store.steps()):  # this command has saved later steps
                result = store.latest(fall_back=notice)
        case "fresh":
            _refuse_to_mix(run, store, 0)
        case mode:
            result = _newest(run, store, fall_back=notice if mode == "newest good" else None)
            if result is not None:
                refuse_changed(result.config, run, store.folder, run.trainer.path_of("ckpt_path"))
            elif mode == "must":
                raise ResumeError(
                    f"{run.trainer.path_of('recover_mode')} = resume, but {store.folder} contains no checkpoint: set "
                    f"{run.trainer.path_of('ckpt_path')} to the folder of the run's checkpoints, or set recover_mode = "
                    "auto to start from scratch if there is none"
                )
    if result is None and folder.model.exists():
        raise ResumeError(
            f"{folder.path} contains a trained model, but no checkpoint to continue from: choose another "
            f"{run.trainer.path_of('run_path')}, or delete the folder to train again"
        )
    return result


Beginning = Literal["fresh", "named", "newest", "newest good", "must"]


def beginning(run: AnyRun, *, restarted: bool) -> Beginning:
    """Start of the run, by `trainer.recover_mode` or, if that is not set, by `trainer.resume_mode`. With
    `restarted`, it is what this command has saved.
    """
    match run.trainer.recover_mode, run.trainer.resume_mode:
        case (None, "from_path"):
            return "named"
        case ("auto", _):
            return "newest good"
        case _ if restarted:
            return "newest good"
        case ("resume", _):
            return "must"
        case (None, "latest"):
            return "newest"
        case _:
            return "fresh"


def _newest(run: AnyRun, store: CheckpointStore, fall_back: Callable[[str], None] | None) -> Checkpoint | None:
    try:
        return store.latest(fall_back=fall_back)
    except ResumeError as error:
        earlier = store.steps()[:-1]
        if fall_back is not None or not earlier:
            raise
        raise ResumeError(
            f"{error}. There are earlier checkpoints ({', '.join(map(str, earlier))}): "
            f"{run.trainer.path_of('recover_mode')}=auto continues from the newest intact one"
        ) from error


def _refuse_to_mix(run: AnyRun, store: CheckpointStore, step: int) -> None:
    """Refuse a folder with later checkpoints: they are of another run history, and this run would overwrite them."""
    later = [number for number in store.steps() if number > step]
    if later:
        raise ResumeError(
            f"{store.folder} contains checkpoints of later steps ({', '.join(map(str, later))}), which this run would "
            f"overwrite: choose another {run.trainer.path_of('ckpt_path')}, or "
            f"{run.trainer.path_of('resume_mode')} = latest to continue from them"
        )
