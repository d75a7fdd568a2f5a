"""One session of a run: the step it starts from, the resources it holds, and the files it leaves.

`Experiment` is the protocol of what a session can run; `ProcessSettings` are settings of the whole process that code of
a user may change, and that the numbers or the life of a run depend on.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError

from skyrl.checkpoint.store import Checkpoint, CheckpointStore
from skyrl.errors import NonFiniteError, RunError, SkyRLError, StorageError
from skyrl.planning.layout import counted
from skyrl.processes.event_loop import event_loop
from skyrl.processes.garbage import seldom_collected
from skyrl.processes.handles import Processes
from skyrl.processes.linux import needs_linux
from skyrl.processes.progress import Progress, WaitReporter, Watchdog
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.processes.signals import RESUMES_FROM_LAST_CHECKPOINT
from skyrl.runs.checkpoint_manager import CheckpointManager
from skyrl.runs.input_digests import carried_on, refuse_changed_inputs
from skyrl.runs.inputs import notice
from skyrl.runs.progress_file import ProgressFile
from skyrl.runs.resume import find_start
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.run_lock import RunLock, changes_since, changes_to_say, config_text
from skyrl.runs.run_tree import AnyRun
from skyrl.storage.disk import FULL, OPEN_FILES, Disk, nearest, readable, remedy
from skyrl.tracking.tracker import LastMetrics, Tracker, Trackers
from skyrl.training.alarms import Alarms
from skyrl.training.callbacks import Callbacks
from skyrl.training.loop import TrainingLoop


class Experiment(Protocol):
    """The assembled parts of one run, each made when it is first requested."""

    folder: RunFolder
    checkpoints: CheckpointStore
    shutdown: ShutdownSignal
    progress: Progress
    last: LastMetrics
    """Metrics of the last step that was recorded."""

    resources: ExitStack[bool | None]
    """Resources that the run holds until it ends: processes, locks, sockets."""

    locations: Mapping[str, str]
    """Dotted path -> location of the value, such as `run.toml:14`, if known."""

    is_another_try: bool
    """Whether this command ran it before and failed."""

    @property
    def cfg(self) -> AnyRun:
        """The resolved and checked configuration."""

    @property
    def exports(self) -> Path:
        """Folder of the exported models."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those of earlier sessions included."""

    @property
    def products(self) -> tuple[Path, ...]:
        """Files and folders of a finished run; `finish` makes them."""

    @property
    def processes(self) -> Processes:
        """Processes of models and engines."""

    @property
    def started_processes(self) -> Processes | None:
        """Processes of models and engines, or None before any was started."""

    @property
    def callbacks(self) -> Callbacks:
        """The user's callbacks."""

    @property
    def saving(self) -> CheckpointManager:
        """Writes and reads checkpoints of the models that change."""

    def check_inputs(self) -> Mapping[str, object] | None:
        """Check data and models before anything is started. Returns the sandbox in which answers are judged, if any.

        Raises `TaskError`, `DataError`, `ModelError`, `ConfigError`.
        """

    def input_digests(self) -> dict[str, str]:
        """Digests of what a resumed run reads again besides its training rows. See `skyrl.runs.input_digests`."""

    def get_alarms(self) -> Alarms:
        """Alarms of the configuration, in their initial state."""

    def get_tracker(self, first_step: int) -> Tracker:
        """Tracker of metrics; `first_step` steps are recorded already."""

    async def prepare(self) -> None:
        """Prepare the run before the loop is built."""

    def get_loop(self, tracker: Tracker) -> TrainingLoop:
        """The training loop in its initial state."""

    def begin_recording(self) -> None:
        """Start the recording of steps, if the run makes one."""

    async def close(self) -> None:
        """Release the resources that only training needs."""

    async def finish(self) -> None:
        """Write the results of the run: the trained model, and plots or reports about the training."""


class RunSession:
    """Runs an experiment from the check of its inputs to its last file. Single use."""

    def __init__(self, experiment: Experiment) -> None:
        needs_linux("a run")
        self._experiment = experiment
        self._cfg, self._folder = experiment.cfg, experiment.folder
        self._checkpoints, self._shutdown = experiment.checkpoints, experiment.shutdown
        # A lock for every folder that this run writes into, the run's own first.
        fields = {self._folder.path: "run_path"}
        if isinstance(self._checkpoints.storage, Disk):  # in an object store, each checkpoint is compared
            fields.setdefault(self._checkpoints.storage.path, "ckpt_path")
        fields.setdefault(experiment.exports, "export_path")
        field_of = self._cfg.trainer.path_of
        self._locks = [RunLock(path, field_of(field), self._cfg) for path, field in fields.items()]

    def run(self) -> bool:
        """Train to the end; False if an earlier session had already done so. Saved checkpoints stay in every case.

        Raises `Stopped` if a signal or the deadline ends it early.
        """
        with (
            seldom_collected(),
            self._shutdown,
            self._causes_named(),
            WaitReporter(self._experiment.progress, notice),
            self._experiment.resources,
        ):
            checkpoint = self._find_start()
            finished = checkpoint is not None and self._is_last(checkpoint)
            is_whole = all(product.exists() for product in self._experiment.products)
            if not finished or not is_whole:  # the latter: stopped just before the end
                if checkpoint is not None:
                    self._read_again(checkpoint)
                changes = changes_since(checkpoint.config, self._cfg) if checkpoint is not None else {}
                self._folder.record_start(checkpoint.step if checkpoint else 0, changes)
                progress = ProgressFile(
                    self._folder.path,
                    self._experiment.progress,
                    name=self._cfg.trainer.folder("run_path"),
                    total_steps=self._experiment.total_steps,
                    first_step=checkpoint.step if checkpoint else 0,
                )
                self._experiment.resources.enter_context(progress)
                self._watch_progress()
                with self._shutdown.in_loop(), event_loop() as run:
                    run(self._train(checkpoint, finished))
            return not finished

    @contextmanager
    def _causes_named(self) -> Iterator[None]:
        """Report a full disk or a request to stop instead of the errors that follow from it."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            cause = storage_error(error, [lock.folder for lock in self._locks])
            raise cause or error from error
        except RunError as error:
            if self._shutdown.requested:
                raise self._shutdown.stopped(f"{RESUMES_FROM_LAST_CHECKPOINT} Meanwhile: {error}") from error
            raise

    def _find_start(self) -> Checkpoint | None:
        """Check the inputs, lock the folders, and find the checkpoint to continue from."""
        experiment, exit_stack = self._experiment, self._experiment.resources
        with experiment.progress.waiting_for("data and tokenizer"):
            sandbox = experiment.check_inputs()
        for lock in self._locks:
            lock.acquire()
            exit_stack.callback(lock.release)
        exit_stack.callback(self._folder.samples.close)
        checkpoint = find_start(self._cfg, self._checkpoints, self._folder, restarted=experiment.is_another_try)
        text = config_text(self._cfg, experiment.locations)
        for lock in self._locks:
            lock.write_config(text)
            exit_stack.callback(self._free_if_empty, lock)
        if sandbox is not None:
            self._folder.record_sandbox(sandbox)
        return checkpoint

    def _read_again(self, checkpoint: Checkpoint | None) -> dict[str, str]:
        """The digests of what the run reads again, compared with those of the checkpoint. Raises `ResumeError`."""
        now = self._experiment.input_digests()
        if checkpoint is not None:
            refuse_changed_inputs(checkpoint, now, self._cfg)
        return carried_on(checkpoint, now)

    def _is_last(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint is final: of the last step, or one where an alarm or a callback ended the run."""
        state, alarms = checkpoint.state["trainer"], self._experiment.get_alarms()
        alarms.load_state(state.get("alarms", {}))
        if alarms.stopped_by:
            notice(f"Alarm {alarms.stopped_by} ended this run at step {checkpoint.step}; change the alarm to continue.")
        callback = self._experiment.callbacks.stopping(state.get("callbacks", {}))
        if callback:
            notice(f"Callback {callback} ended this run at step {checkpoint.step}; leave it out to continue.")
        return bool(alarms.stopped_by or callback) or checkpoint.step >= self._experiment.total_steps

    def _free_if_empty(self, lock: RunLock) -> None:
        """Free the folder of a run that failed before it saved anything."""
        if not self._checkpoints.steps() and not self._folder.model.exists():
            lock.remove_config()

    async def _train(self, checkpoint: Checkpoint | None, finished: bool) -> None:
        experiment = self._experiment
        if checkpoint is not None:
            with self._shutdown.interruptible():
                await experiment.saving.restore(checkpoint)
        settings = ProcessSettings()
        if not finished:
            loop = await self._make_loop(checkpoint, settings)
            settings.begin()
            with settings.named_in_failures():
                try:
                    await loop.run()
                    await experiment.saving.finish()
                    await self._folder.samples.finished()
                except BaseException as error:
                    await experiment.saving.finish_after(error)
                    raise
                finally:
                    loop.tracker.close()
                    await experiment.close()
        refuse_untrained(self._folder.metrics.read(), self._cfg.trainer.path_of("run_path"))
        with settings.named_in_failures():
            await experiment.finish()
        self._folder.flush()

    async def _make_loop(self, checkpoint: Checkpoint | None, settings: ProcessSettings) -> TrainingLoop:
        """The loop in its state at the checkpoint. Files that it will write again are deleted."""
        experiment, first = self._experiment, checkpoint.step if checkpoint else 0
        with self._shutdown.interruptible():
            await experiment.prepare()
            trackers = [
                experiment.get_tracker(first),
                StepsInLogs(experiment.processes, first),
                experiment.last,
                settings,
            ]
            loop = experiment.get_loop(Trackers(trackers))
            # once more, for models that were on the hub until now
            experiment.saving.input_digests = self._read_again(checkpoint)
            if checkpoint is not None:
                changes = changes_to_say(checkpoint.config, self._cfg)
                notice(f"Continuing after step {checkpoint.step}, from a checkpoint{changes and ', with:'}")
                if changes:
                    notice(changes)
                loop.load_state(dict(checkpoint.state["trainer"]))
        for product in experiment.products:  # of a run that is now extended
            Disk(product.parent).remove(product.name)
        self._forget_what_comes_again(checkpoint)
        experiment.begin_recording()
        return loop

    def _forget_what_comes_again(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            self._folder.forget_after(-1)
        else:
            recorded = checkpoint.state["trainer"].get("unrecorded") is None
            samples = self._folder.forget_after(checkpoint.step, recorded=recorded)
            metrics = self._folder.lacking_steps(checkpoint.step if recorded else checkpoint.step - 1)
            for name, lacking in (("metrics.jsonl", metrics), ("trajectories.jsonl", samples)):
                if lacking:
                    file = self._folder.path / name
                    kind = "samples of " if name == "trajectories.jsonl" else ""
                    notice(f"{file} lacks {kind}{len(lacking)} steps (the first is {lacking[0]}): lost or damaged")

    def _watch_progress(self) -> None:
        """Watch for stalls until the run ends."""
        faults, experiment = self._cfg.trainer.faults, self._experiment
        if faults.stall_timeout_seconds is None:
            return
        stop = faults.on_stall == "stop"

        def stalled(diagnosis: str) -> None:
            experiment.progress.warning = diagnosis
            notice(f"warning: {diagnosis}")
            if stop:
                self._shutdown.request("Stopped because there was no progress", exit_code=RunError.exit_code)

        def dump_others() -> Sequence[Path]:
            processes = experiment.started_processes
            return () if processes is None else processes.dump_stacks()

        watchdog = Watchdog(
            experiment.progress,
            faults.stall_timeout_seconds,
            stacks=self._folder.path / "stacks.txt",
            dump_others=dump_others,
            on_stall=stalled,
            field=self._cfg.trainer.path_of("faults.stall_timeout_seconds"),
        )
        experiment.resources.callback(watchdog.close)


def refuse_untrained(records: Iterable[Mapping[str, object]], field: str) -> None:
    """Raise `NonFiniteError` if there are steps among these records of metrics, and every optimizer step of each was
    left out because a number was not finite. `field` names the run's folder in the message.
    """
    steps = 0
    for record in records:
        if record["step"] and not _left_out(record):
            return
        steps += bool(record["step"])
    if steps:
        raise NonFiniteError(
            f"nothing was learned: every optimizer step of the run ({counted(steps, 'step')}) was left out because a "
            "number was not finite. No trained model is written, since it would be the one that the run started from. "
            f"Mend the rewards, estimator or loss that gave such numbers, and start a new run with another {field}"
        )


def _left_out(record: Mapping[str, object]) -> bool:
    """Whether a step did not change the trained model because of a number that is not finite."""
    for prefix in ("policy", "train"):
        norm = record.get(f"{prefix}/grad_norm")  # a text if it is not finite; of steps that were left out, it is not
        if record.get(f"{prefix}/skipped_updates") and not isinstance(norm, int | float):
            return True
    return bool(record.get("trainer/skipped_steps"))


class StepsInLogs:
    """A `Tracker` that informs the processes of each step that starts."""

    def __init__(self, processes: Processes, recorded_steps: int) -> None:
        """`recorded_steps` is the number of steps that have been recorded before."""
        self._processes = processes
        processes.step = recorded_steps + 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._processes.step = step + 1

    def close(self) -> None:
        """Does nothing: no resource is held."""


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


_READ: Mapping[str, Callable[[], object]] = {
    "os.chdir": _working_folder,
    "torch.set_default_dtype": torch.get_default_dtype,
    "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision,
    "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "sys.setrecursionlimit": sys.getrecursionlimit,
}
"""Function that changes a setting -> function that reads it. Settings of a thread, such as grad mode, do no harm in
threads of rewards."""


class ProcessSettings:
    """The settings at the start of training. As a tracker, it reports after a step what has changed since, once, and
    returns to the working folder, from which the paths of a run start.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Take the current settings for those of the run: models and engines have been made."""
        self._before = self._told = _settings_now()
        self._recursion = sys.getrecursionlimit()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if (now := _settings_now()) != self._told:
            self._told = now
            if changed := self._changes():
                notice(f"warning: {changed}: the numbers of the run may depend on it")
        if now["os.chdir"] != self._before["os.chdir"]:
            with suppress(OSError):  # the folder was removed
                os.chdir(str(self._before["os.chdir"]))

    def close(self) -> None:
        """Does nothing: no resource is held."""

    @contextmanager
    def named_in_failures(self) -> Iterator[None]:
        """Raises `RunError` for a failure that no exception of skyrl explains, if a setting has changed."""
        try:
            yield
        except SkyRLError:
            raise
        except Exception as error:
            changed = self._changes()
            sys.setrecursionlimit(max(sys.getrecursionlimit(), self._recursion))  # the way to the message takes frames
            if changed:
                raise RunError(f"{changed}. The run then failed: {type(error).__name__}: {error}") from error
            raise

    def _changes(self) -> str:
        now = _settings_now()
        changed = [f"{name}: {was} before, {now[name]} now" for name, was in self._before.items() if now[name] != was]
        if not changed:
            return ""
        return f"code of this run (a reward, an environment?) changed its whole process ({', '.join(changed)})"


def _settings_now() -> dict[str, object]:
    return {name: read() for name, read in _READ.items()}


_OF_A_DISK = FULL | OPEN_FILES | {errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT}
"""Errors that no mistake in a program causes, whichever file they are about."""


def storage_error(error: OSError | SafetensorError, folders: Sequence[Path]) -> StorageError | None:
    """The exception to raise; None if no disk is at fault. `folders` are those that the run writes into.

    Any error about a file in one of the folders counts: their content is the run's own.
    """
    number, name = _number(error), getattr(error, "filename", None)
    folder = next((item for item in folders if name and Path(os.fsdecode(name)).is_relative_to(item)), None)
    if number not in _OF_A_DISK and folder is None:
        return None
    where = f"{os.fsdecode(name)}: " if name else ""
    free = ", ".join(
        f"{readable(shutil.disk_usage(nearest(folder)).free)} are free in {folder}" for folder in dict.fromkeys(folders)
    )
    advice = remedy(number, folder or next(iter(folders), None))
    return StorageError(
        f"A file of the run cannot be read or written: {where}{os.strerror(number or 0)}; {free}. What was saved "
        f"before is whole: {advice}, and the same command continues from the last checkpoint"
    )


def _number(error: OSError | SafetensorError) -> int | None:
    """The errno; safetensors has it in its text: `I/O error: No space left on device (os error 28)`."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"os error (\d+)", str(error))
    return int(match[1]) if match else None
