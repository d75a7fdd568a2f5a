"""The protocol of experiments that a session can run."""

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
