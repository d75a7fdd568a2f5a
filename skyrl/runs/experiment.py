"""The protocol of experiments, as a session runs them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from skyrl.checkpoint.store import CheckpointStore
from skyrl.processes.handles import Processes
from skyrl.processes.progress import Progress
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.runs.checkpoint_manager import CheckpointManager
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.run_tree import AnyRun
from skyrl.tracking.tracker import LastMetrics, Tracker
from skyrl.training.alarms import Alarms
from skyrl.training.loop import TrainingLoop


class Experiment(Protocol):
    """One run, put together. Its parts are made when they are first asked for."""

    folder: RunFolder
    checkpoints: CheckpointStore
    shutdown: ShutdownSignal
    progress: Progress
    last: LastMetrics
    """Metrics of the last step that was recorded."""

    held: ExitStack
    """Resources that the run holds until it ends: processes, locks, sockets."""

    places: Mapping[str, str]
    """Dotted path -> place that gave the value, such as `run.toml:14`, as far as known."""

    is_another_try: bool
    """Did this command run it before, and did it fail?"""

    @property
    def cfg(self) -> AnyRun:
        """Resolved and checked."""

    @property
    def exports(self) -> Path:
        """Folder of the exported models."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those of earlier sessions included."""

    @property
    def processes(self) -> Processes:
        """Processes of models and engines."""

    @property
    def started_processes(self) -> Processes | None:
        """Processes of models and engines, or None before any was started."""

    @property
    def saving(self) -> CheckpointManager:
        """Writes and reads checkpoints of the models that change."""

    def check_inputs(self) -> Mapping[str, object] | None:
        """Data and models, before anything is started; the sandbox that answers are judged in, if there is one.

        Raises `TaskError`, `DataError`, `ModelError`, `ConfigError`.
        """

    def get_alarms(self) -> Alarms:
        """Alarms of the configuration, which have seen nothing yet."""

    def get_tracker(self, first_step: int) -> Tracker:
        """Tracker of metrics; `first_step` steps are recorded already."""

    async def prepare(self) -> None:
        """Prepare the run, before the loop is put together."""

    def get_loop(self, tracker: Tracker) -> TrainingLoop:
        """The training loop, at its beginning."""

    def begin_recording(self) -> None:
        """Start the recording of steps, where the run makes one."""

    async def close(self) -> None:
        """Let go of what training alone needed."""

    async def finish(self) -> None:
        """Write what the run leaves: the trained model, and what shows how it came about."""
