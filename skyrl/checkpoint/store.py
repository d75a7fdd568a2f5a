"""Checkpoints on a local disk: `ckpt_path/global_step_N/`, each complete or absent.

A checkpoint is written into a temporary folder that is renamed when everything in it has reached the disk. No file says
which is the latest: the complete folder with the highest step is.

    global_step_40/
        tensors.safetensors     parameters and optimizer state
        state.json              everything else that a resumed run needs
        config.json             the resolved configuration, and its fingerprint
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl.errors import ResumeError, RunError
from skyrl.tree.dump import SCHEMA_VERSION

_NAME = re.compile(r"global_step_(\d+)")
_SCRATCH = ".unfinished_"


@frozen(kw_only=True)
class Checkpoint:
    """What was saved after a step. `tensors` and `state` are as the trainer gave them."""

    step: int
    tensors: Mapping[str, Tensor] = field(repr=False)
    state: Mapping[str, Any]
    config: Mapping[str, Any] = field(repr=False)
    """`cattrs.unstructure` of the resolved configuration."""

    fingerprint: str


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = -1) -> None:
        """`keep` is how many of the newest to keep; -1 keeps all."""
        self.folder = folder
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write, make it last, then make it visible. Older checkpoints beyond `keep` go afterwards.

        One process at a time may save into a folder. Raises `RunError` if the disk refuses.
        """
        final = self.folder / f"global_step_{checkpoint.step}"
        try:
            self._write(checkpoint, final)
        except OSError as error:
            raise RunError(f"the checkpoint {final} cannot be written: {error.strerror or error}") from error
        self._forget_old()
        return final

    def _write(self, checkpoint: Checkpoint, final: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob(f"{_SCRATCH}*"):  # what a killed process left
            shutil.rmtree(unfinished)
        scratch = self.folder / f"{_SCRATCH}{final.name}"
        scratch.mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
        save_file(tensors, scratch / "tensors.safetensors")
        _write_json(scratch / "state.json", {"step": checkpoint.step, **checkpoint.state})
        stored = {"schema_version": SCHEMA_VERSION, "fingerprint": checkpoint.fingerprint, "config": checkpoint.config}
        _write_json(scratch / "config.json", stored)
        for file in scratch.iterdir():
            _reach_the_disk(file)
        _reach_the_disk(scratch)
        if final.exists():  # the same step, saved by a session that this one resumed from before
            shutil.rmtree(final)
        scratch.rename(final)
        _reach_the_disk(self.folder)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(name[1]) for name in found if name)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, or None if there is none. Raises `ResumeError` if it is damaged."""
        steps = self.steps()
        return load_checkpoint(self.folder / f"global_step_{steps[-1]}") if steps else None

    def _forget_old(self) -> None:
        if self._keep > 0:
            for step in self.steps()[: -self._keep]:
                shutil.rmtree(self.folder / f"global_step_{step}")


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read one `global_step_N` folder. Raises `ResumeError` that names the file that is missing or damaged."""
    if not folder.is_dir():
        raise ResumeError(f"there is no checkpoint folder {folder}")
    state = _read_json(folder / "state.json")
    stored = _read_json(folder / "config.json")
    tensors = folder / "tensors.safetensors"
    try:
        return Checkpoint(
            step=state.pop("step"),
            tensors=load_file(tensors),
            state=state,
            config=stored["config"],
            fingerprint=stored["fingerprint"],
        )
    except KeyError as error:
        raise ResumeError(f"{folder} is not a complete checkpoint: {error} is missing") from error
    except Exception as error:  # safetensors raises its own type for damage
        raise ResumeError(f"{tensors} cannot be read: {error}") from error


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ResumeError(f"{path} does not hold an object")
    return data


def _reach_the_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
