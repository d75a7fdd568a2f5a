"""Checkpoints of a run: saves and restores the state of its learners and of its training loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from skyrl.checkpoint.manifest import StoredFile
from skyrl.checkpoint.pending import PendingSave
from skyrl.checkpoint.shards import StoredTensors
from skyrl.checkpoint.store import Checkpoint, CheckpointStore, Retention, finite_metrics
from skyrl.config.loading.resolve import derived
from skyrl.config.loading.stored import stored_tree
from skyrl.config.settings.run_basics import RunBasics
from skyrl.errors import ResumeError
from skyrl.learners.workers.group import ScorerGroup
from skyrl.processes.redaction import redacted_configuration
from skyrl.runs.input_digests import STATE, Digests
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.run_tree import AnyRun
from skyrl.tracking.tracker import LastMetrics
from skyrl.training.time_sharing import TimeSharing
from skyrl.tree import fingerprint


def checkpoint_store(trainer: RunBasics) -> CheckpointStore:
    """The store of a run's checkpoints, with its retention."""
    retention = Retention(
        last=trainer.max_ckpts_to_keep,
        every=trainer.ckpt_keep_every,
        best=trainer.ckpt_keep_best,
        metric=trainer.ckpt_best_metric,
        larger_is_better=trainer.ckpt_best_is == "max",
    )
    return CheckpointStore(trainer.folder("ckpt_path"), retention, verify=trainer.ckpt_verify)


class CheckpointManager:
    """Saves and restores the models that learn, together with the state of the loop."""

    def __init__(
        self,
        run: AnyRun,
        store: CheckpointStore,
        models: Mapping[str, ScorerGroup[Any]],
        time_sharing: TimeSharing,
        folder: RunFolder,
        last: LastMetrics,
    ) -> None:
        """`folder` has the records of steps that a rollback deletes; `last` has the metrics of the step being saved."""
        self._run, self._store, self._models, self._time_sharing = run, store, models, time_sharing
        self._folder, self._last = folder, last
        self._pending = PendingSave()
        self.input_digests: Digests = {}
        """Digests of what a resumed run reads again besides its checkpoint."""

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state of every model and write it with the loop's `state`, at once or while the run continues.

        Raises `NonFiniteError` if the state holds NaN or infinity, `RunError` if it cannot be written or the previous
        checkpoint could not.
        """
        await self._pending.finish()
        await self._folder.samples.finished()
        for name, model in self._models.items():
            await self._time_sharing.for_learning(name)
            await model.refuse_non_finite_state()
        numbers: dict[str, Any] = {}
        need = 0
        for name, model in self._models.items():
            await self._time_sharing.for_learning(name)
            numbers[name], size = await model.stage()
            need += size
        checkpoint = Checkpoint(
            step=step,
            models={},
            state={"trainer": deepcopy(state), STATE: self.input_digests, **numbers},  # it is written later
            config=redacted_configuration(stored_tree(self._run)),
            fingerprint=fingerprint(self._run),
            derived=derived(self._run),
            world_size={name: len(model.ranks) for name, model in self._models.items()},
            metrics=finite_metrics(self._last.metrics),
        )
        await self._pending.start(self._write(checkpoint, need))
        if not self._run.trainer.async_ckpt_save:
            await self._pending.finish()

    async def finish(self) -> None:
        """Return when all pending saves are written. Raises `RunError` if one could not be written."""
        await self._pending.finish()

    async def finish_after(self, error: BaseException) -> None:
        """Finish pending saves after the run failed with `error`, which takes precedence over errors of the saves."""
        await self._pending.finish_after(error)

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Load the models from the checkpoint. Raises `ResumeError` for a checkpoint of other models."""
        for name, model in self._models.items():
            await self._time_sharing.for_learning(name)
            stored, step = checkpoint.models.get(name), checkpoint.step
            if stored is None:
                raise ResumeError(f"the checkpoint of step {step} contains no {name}: it is from another run")
            assert isinstance(stored, StoredTensors), "it was loaded from its files"
            await model.load_state(stored, checkpoint.state[name])

    async def go_back(self) -> Mapping[str, Any] | None:
        """Restore the models of the last checkpoint and forget later steps. Returns the loop's state in it, or None if
        there is no checkpoint.
        """
        await self._pending.finish()
        checkpoint = self._store.latest()
        if checkpoint is None:
            return None
        await self.restore(checkpoint)
        self._folder.forget_after(checkpoint.step)
        state: Mapping[str, Any] = checkpoint.state["trainer"]
        return state

    async def _write(self, checkpoint: Checkpoint, need: int) -> None:
        folder = await asyncio.to_thread(self._store.begin, checkpoint.step, need)
        files: list[StoredFile] = []
        with self._store.saving(checkpoint.step, need):
            for model in self._models.values():
                files += await model.write_staged(self._store.storage, folder)
            # A power failure must not take what the checkpoint goes on from.
            await asyncio.to_thread(self._folder.flush)
        await asyncio.to_thread(self._store.finish, checkpoint, files, need)
