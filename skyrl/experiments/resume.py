"""Where a run begins: at the start, at a checkpoint, or not at all, because something would be lost."""

from __future__ import annotations

from pathlib import Path

from skyrl.checkpoint.store import Checkpoint, CheckpointStore, load_checkpoint
from skyrl.config import SkyRLTrainConfig
from skyrl.errors import ResumeError
from skyrl.experiments.claims import refuse_changed
from skyrl.experiments.run_folder import RunFolder
from skyrl.tree import required


def find_start(run: SkyRLTrainConfig, store: CheckpointStore, folder: RunFolder) -> Checkpoint | None:
    """The checkpoint that `trainer.resume_mode` says, or None for a start from the beginning.

    Raises `ResumeError` for a checkpoint of another run, and where a finished run or later checkpoints would be
    overwritten.
    """
    trainer = run.trainer
    match trainer.resume_mode:
        case "from_path":
            path = required(trainer.resume_path, "trainer.resume_path")
            found = load_checkpoint(Path(path).expanduser())
            refuse_changed(found.config, run, path, "trainer.resume_path")
            _refuse_to_mix(store, found.step)
            return found
        case "latest":
            latest = store.latest()
            if latest is not None:
                refuse_changed(latest.config, run, str(store.folder), "trainer.ckpt_path")
                return latest
        case _:
            _refuse_to_mix(store, 0)
    if folder.model.exists():
        raise ResumeError(
            f"{folder.path} holds a trained model, and no checkpoint to go on from: choose another trainer.run_path, "
            "or delete the folder to train again"
        )
    return None


def _refuse_to_mix(store: CheckpointStore, step: int) -> None:
    """Later checkpoints in the folder are of another course of events; this run would replace them one by one."""
    later = [number for number in store.steps() if number > step]
    if later:
        raise ResumeError(
            f"{store.folder} holds checkpoints of later steps ({', '.join(map(str, later))}), which this run would "
            "overwrite: choose another trainer.ckpt_path, or trainer.resume_mode = latest to continue from them"
        )
