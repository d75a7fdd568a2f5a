"""Observables of checkpoints: which are kept, how they are verified and written, and where a run begins."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.checkpoint.manifest import StoredFile
from skyrl.checkpoint.store import Checkpoint, CheckpointStore
from skyrl.config.loading.resolve import derived
from skyrl.config.loading.stored import stored_tree
from skyrl.errors import ResumeError
from skyrl.runs.checkpoint_manager import CheckpointManager, checkpoint_store
from skyrl.runs.resume import find_start
from skyrl.runs.run_folder import RunFolder
from skyrl.tracking.tracker import LastMetrics
from skyrl.training.time_sharing import TimeSharing
from skyrl.tree import evolve_at, fingerprint
from tests.effects.probe import Scene, observable

SCORES = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.4, 5: 0.2, 6: 0.3}
"""Metric of each step that is saved."""


@contextmanager
def store_of(run: Any) -> Iterator[CheckpointStore]:
    """The run's store. Nobody waits for the disk: the machine is not switched off here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield checkpoint_store(run.trainer)


def checkpoint(run: Any, step: int) -> Checkpoint:
    """A checkpoint of a run whose policy has one number."""
    return Checkpoint(
        step=step,
        models={"policy": {"weight": torch.full((4,), float(step))}},
        state={"trainer": {"version": step}},
        config=stored_tree(run),
        fingerprint=fingerprint(run),
        derived=derived(run),
        world_size={"policy": 1},
        metrics={"eval/all/avg_score": SCORES[step], "eval/all/other": -SCORES[step] % 0.35},
    )


@observable("the checkpoints that are left of six")
def kept(scene: Scene) -> object:
    with store_of(scene.run) as store:
        for step in SCORES:
            store.save(checkpoint(scene.run, step))
    return sorted(str(path.relative_to(Path.cwd())) for path in Path.cwd().rglob("global_step_*"))


@observable("whether a checkpoint with a flipped bit is taken")
def verified(scene: Scene) -> object:
    with store_of(scene.run) as store:
        file = next(Path(store.save(checkpoint(scene.run, 1))).rglob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
        return begun(lambda: store.latest())


class SlowModel:
    """A model whose state takes until the next turn of the event loop to be written."""

    ranks = (None,)

    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def refuse_non_finite_state(self) -> None:
        """It is finite."""

    async def stage(self) -> tuple[dict[str, Any], int]:
        return {}, 0

    async def write_staged(self, storage: object, folder: str) -> list[StoredFile]:
        await asyncio.sleep(0)
        self._events.append("written")
        return []


@observable("whether a run waits until its checkpoint is written")
def waits(scene: Scene) -> object:
    events: list[str] = []
    model: Any = SlowModel(events)
    folder = RunFolder(Path("out/run"))

    async def save(store: CheckpointStore) -> None:
        manager = CheckpointManager(scene.run, store, {"policy": model}, TimeSharing({}, None), folder, LastMetrics())
        await manager.save(1, {})
        events.append("training")
        await manager.finish()

    with store_of(scene.run) as store:
        asyncio.run(save(store))
    return events


def begun(find: Any) -> object:
    """The step that a run begins after, or why it does not begin."""
    with redirect_stderr(StringIO()):
        try:
            start_point = find()
        except ResumeError as error:
            return str(error).partition("\n")[0].replace(str(Path.cwd()), "")
    return start_point and start_point.step


@observable("where a run begins in whose folder two checkpoints are, first and after a failure")
def start(scene: Scene) -> object:
    folder = RunFolder(Path("out/run"))
    with store_of(scene.run) as store:
        for step in (1, 2):
            store.save(checkpoint(scene.run, step))
        return [
            begun(lambda again=again: find_start(scene.run, store, folder, restarted=again)) for again in (False, True)
        ]


@observable("where a run begins whose checkpoint is of another temperature")
def start_after_a_change(scene: Scene) -> object:
    other = evolve_at(scene.run, "generator.sampling_params.temperature", 0.35)
    with store_of(scene.run) as store:
        store.save(evolve(checkpoint(scene.run, 1), config=stored_tree(other)))
        return begun(lambda: find_start(scene.run, store, RunFolder(Path("out/run"))))
