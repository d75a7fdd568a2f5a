"""One session of a training run: where it begins, what it holds while it lasts, and what it leaves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from skyrl.checkpoint.storage import Disk
from skyrl.checkpoint.store import Checkpoint
from skyrl.errors import RunError
from skyrl.processes.progress import Watchdog
from skyrl.processes.redaction import redacted
from skyrl.processes.signals import GOES_ON_FROM_THE_LAST
from skyrl.runs.preflight import check_data, look_at_the_models, sandbox_in_force, say
from skyrl.runs.recorded import begin_recording, watch
from skyrl.runs.resume import find_start
from skyrl.runs.run_lock import RunLock, changes_to_say
from skyrl.runs.steps_in_logs import StepsInLogs
from skyrl.runs.storage_failures import storage_error
from skyrl.tracking.tracker import Tracker, Trackers
from skyrl.training.loop import TrainingLoop

if TYPE_CHECKING:
    from skyrl.experiments.ppo import BasePPOExp


class RunSession:
    """From the first look at the data to the last file. Single use."""

    def __init__(self, experiment: BasePPOExp) -> None:
        self._experiment = experiment
        self._cfg, self._folder = experiment.cfg, experiment.folder
        self._checkpoints, self._shutdown = experiment.checkpoints, experiment.shutdown

    def run(self) -> bool:
        """See `BasePPOExp.run`."""
        with self._shutdown:
            try:
                return self._run()
            except (OSError, SafetensorError) as error:
                told = storage_error(error, [lock.folder for lock in reversed(self._claims())])
                raise told or error from error
            except RunError as error:
                if self._shutdown.requested:  # what fell over meanwhile is not the cause
                    raise self._shutdown.stopped(f"{GOES_ON_FROM_THE_LAST} Meanwhile: {error}") from error
                raise

    def _run(self) -> bool:
        experiment = self._experiment
        with experiment.held as held:
            sandbox = None if experiment.recorded else self._look()  # what was recorded was looked at then
            locks = self._claims()
            for lock in locks:
                lock.acquire()
                held.callback(lock.release)
            checkpoint = find_start(self._cfg, self._checkpoints, self._folder, again=experiment.is_another_try)
            for lock in locks:
                lock.write_config()
                held.callback(self._keep_or_unsign, lock)
            if sandbox is not None:
                self._folder.record_sandbox(sandbox)
            finished = checkpoint is not None and checkpoint.step >= experiment.total_steps
            if not finished or not self._folder.model.exists():  # the latter: stopped just before the end
                self._watch_progress()
                with self._shutdown.in_loop():
                    asyncio.run(self._go_on(checkpoint, finished))
            return not finished

    def _look(self) -> Mapping[str, object] | None:
        """Data and models, before anything is started; the sandbox that answers are judged in, if one is."""
        train, evaluation = self._experiment.train_dataset, self._experiment.eval_dataset
        sandbox = sandbox_in_force(self._cfg, train, evaluation)
        check_data(self._cfg, train, evaluation)
        look_at_the_models(self._cfg, self._experiment.tokenizer, train, evaluation)
        return sandbox

    def _claims(self) -> tuple[RunLock, ...]:
        """Every folder that this run writes into, once."""
        fields = {self._experiment.exports: "trainer.export_path"}
        if isinstance(self._checkpoints.storage, Disk):  # in an object store, each checkpoint is compared
            fields[self._checkpoints.storage.path] = "trainer.ckpt_path"
        fields[self._folder.path] = "trainer.run_path"
        return tuple(RunLock(path, field, self._cfg) for path, field in fields.items())

    def _keep_or_unsign(self, lock: RunLock) -> None:
        """A run that failed before it kept anything leaves its folders free."""
        if not self._checkpoints.steps() and not self._folder.model.exists():
            lock.remove_config()

    async def _go_on(self, checkpoint: Checkpoint | None, finished: bool) -> None:
        if checkpoint is not None:
            with self._shutdown.interruptible():
                await self._experiment.saving.restore(checkpoint)
        if not finished:
            await self._train(checkpoint)
        await self._finish()

    async def _train(self, checkpoint: Checkpoint | None) -> None:
        experiment = self._experiment
        with self._shutdown.interruptible():
            await experiment.time_sharing.for_engines()  # which find the room that they start with
            loop = self._loop(checkpoint)
        shutil.rmtree(self._folder.model, ignore_errors=True)  # of a run that is now made longer
        self._forget_what_comes_again(checkpoint)
        if self._cfg.trainer.recording != "off":
            recording = begin_recording(self._folder, self._cfg.trainer.recording, experiment.total_steps)
            watch(loop.trainer, recording, experiment.learners, experiment.time_sharing, experiment.clock)
        try:
            await loop.run()
            await experiment.saving.finish()
        except BaseException as error:
            await experiment.saving.finish_after(error)
            raise
        finally:
            loop.tracker.close()
            await experiment.close(loop)

    def _loop(self, checkpoint: Checkpoint | None) -> TrainingLoop:
        """The loop, where it was when the checkpoint was saved."""
        experiment, first = self._experiment, checkpoint.step if checkpoint else 0
        others: list[Tracker] = [StepsInLogs(experiment.processes, first), experiment.last]
        loop = experiment.get_loop(Trackers([experiment.get_tracker(first), *others]))
        if checkpoint is not None:
            changes = changes_to_say(checkpoint.config, self._cfg)
            say(f"Going on after step {checkpoint.step}, from a checkpoint{changes and ', with:'}")
            if changes:
                say(changes)
            loop.load_state(dict(checkpoint.state["trainer"]))
        return loop

    def _forget_what_comes_again(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            self._folder.forget_after(-1)
        else:
            recorded = checkpoint.state["trainer"].get("unrecorded") is None
            self._folder.forget_after(checkpoint.step, recorded=recorded)

    async def _finish(self) -> None:
        """What a run leaves: the model, and a picture of how it came about."""
        await self._experiment.export(self._folder.model)
        self._folder.draw_curve(redacted(f"{self._cfg.trainer.project_name} / {self._cfg.trainer.run_name}"))

    def _watch_progress(self) -> None:
        """Notices that nothing happens any more, until the run ends."""
        faults, experiment = self._cfg.trainer.faults, self._experiment
        if faults.stall_timeout_seconds is None:
            return
        stop = faults.on_stall == "stop"

        def stalled(diagnosis: str) -> None:
            say(f"warning: {diagnosis}")
            if stop:
                self._shutdown.request("Stopped, since there was no progress", exit_code=RunError.exit_code)

        def dump_others() -> Sequence[Path]:
            started = "processes" in vars(experiment)
            return experiment.processes.dump_stacks() if started else ()

        watchdog = Watchdog(
            experiment.progress,
            faults.stall_timeout_seconds,
            stacks=self._folder.path / "stacks.txt",
            dump_others=dump_others,
            on_stall=stalled,
        )
        experiment.held.callback(watchdog.close)
