"""The common part of all experiments: folders, processes, checkpoints, metrics, exports.

Each part is made by its `get_...` method when it is first needed, and then kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import attrs
from torch import Tensor

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config.loading.check import check
from skyrl.config.loading.kinds import kind_of
from skyrl.config.settings.alarms import alarms_of
from skyrl.config.settings.learners import LearnerConfig
from skyrl.errors import ConfigError, RunError, render
from skyrl.experiments.exports import policy_export
from skyrl.experiments.factories import start_processes
from skyrl.learners.ranks import Ranks, Rendezvous
from skyrl.learners.workers.group import LearnerGroup, ScorerGroup
from skyrl.learners.workers.learning_worker import LearningWorker
from skyrl.learners.workers.model_worker import ModelWorker
from skyrl.models.files.loading import load_tokenizer
from skyrl.models.saving.storing import AdapterExport
from skyrl.planning.replicas import Replicas
from skyrl.processes.handles import Processes
from skyrl.processes.progress import Progress
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.runs.checkpoint_manager import CheckpointManager, checkpoint_store
from skyrl.runs.input_digests import TOKENIZER, model_digests, model_file_digests
from skyrl.runs.inputs import notice
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.run_tree import AnyRun
from skyrl.runs.session import RunSession
from skyrl.tracking.factory import trackers_of
from skyrl.tracking.jsonlines import MetricsFile
from skyrl.tracking.services.follower import Follower, WithLag
from skyrl.tracking.timeline import Timeline
from skyrl.tracking.timing import Clock
from skyrl.tracking.tracker import LastMetrics, Tracker
from skyrl.training.alarms import Alarms, RaisedAlarm
from skyrl.training.callbacks import Callback, Callbacks, callbacks_by_name
from skyrl.training.loop import TrainingLoop
from skyrl.training.time_sharing import TimeSharing
from skyrl.tree import required


class HeldResources(ExitStack[bool | None]):
    """An `ExitStack` whose callbacks do not replace the error that ends the run: theirs is reported before it.

    Cleaning up often fails for the same cause, such as a lack of file descriptors, with a message that says less.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Release everything, latest first. Raises the error of a callback if the run itself did not fail."""
        try:
            return super().__exit__(kind, error, trace)
        except Exception as later:
            if error is None or later is error:
                raise
            notice(f"Cleaning up failed, too: {type(later).__name__}: {later}")
            return False


def experiment_class(run: AnyRun) -> type[BaseExp]:
    """The class that runs this kind of configuration, imported now."""
    result = kind_of(run).experiment_class()
    assert issubclass(result, BaseExp), f"{result} is not an experiment"
    return result


class BaseExp:
    """One run, in this process or spread over those of a Ray cluster. Subclasses define what is trained, and how."""

    role: ClassVar[str] = "policy"
    """Name of the exported model in checkpoints."""

    cfg: AnyRun

    def __init__(self, cfg: AnyRun) -> None:
        """`cfg` is resolved and checked: `skyrl.config.compose` gives one."""
        self.cfg = cfg
        self.progress = Progress()
        self.clock = Clock(self.progress.waiting_for)
        faults = cfg.trainer.faults
        self.shutdown = ShutdownSignal(
            grace=faults.grace_period_seconds,
            stop_before=faults.stop_before,
            field=cfg.trainer.path_of("faults.stop_before"),
        )
        self.folder = RunFolder(Path(cfg.trainer.folder("run_path")).expanduser().absolute())
        self.checkpoints = checkpoint_store(cfg.trainer)
        self.is_another_try = False
        """Whether this command ran it before and failed. It then continues from the newest good checkpoint."""
        self.locations: Mapping[str, str] = {}
        """Dotted path -> place that gave its value, such as `run.toml:14`, kept in the run's folder for reports."""
        self.more_callbacks: Sequence[Callback] = ()
        """Callbacks that the program gave as objects, besides those that the configuration names."""
        self.last = LastMetrics()
        self.resources: ExitStack[bool | None] = HeldResources()
        self.started_processes: Processes | None = None

    def run(self) -> bool:
        """Train to the end; False if an earlier session had already done so. Saved checkpoints stay in every case.

        Raises `ConfigError` if the configuration cannot be used: `from_dict` and the other constructors resolve a tree
        without checking it. Raises `Stopped` if a signal or the deadline ends it early.
        """
        problems = check(self.cfg)
        if errors := [problem for problem in problems if problem.severity == "error"]:
            raise ConfigError(errors)
        if problems:
            notice(render(problems, "Warnings"))
        return RunSession(self).run()

    # The parts of a run, cached once made. Override the method that makes one.

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return self.get_tokenizer()

    @cached_property
    def processes(self) -> Processes:
        starting = self.progress.waiting_for(f"the start of {self.cfg.trainer.placement.executor}")
        with starting, self.shutdown.at_any_point():  # a cluster may take minutes to answer, or never answer
            processes = self.started_processes = self.get_processes()
        processes.progress = self.progress
        processes.exit_notice.listen(
            lambda: self.shutdown.request(f"Stopped because {processes.exit_notice.error}", RunError.exit_code)
        )
        self.resources.callback(processes.close)
        self.prepare_processes(processes)
        return processes

    @cached_property
    def rendezvous(self) -> Rendezvous:
        timeout = self.cfg.trainer.placement.start_timeout_seconds
        return self.resources.enter_context(Rendezvous(self.processes.host, timeout=timeout))

    @cached_property
    def time_sharing(self) -> TimeSharing:
        return self.get_time_sharing()

    @cached_property
    def callbacks(self) -> Callbacks:
        """The callbacks of the configuration and of the program."""
        return self.get_callbacks()

    @cached_property
    def saving(self) -> CheckpointManager:
        """Writes and reads checkpoints of the models that change."""
        return CheckpointManager(
            self.cfg, self.checkpoints, self.checkpointed_models, self.time_sharing, self.folder, self.last
        )

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        raise TypeError(f"{type(self).__name__} does not define total_steps")

    @property
    def learners(self) -> Mapping[str, LearnerGroup[LearningWorker]]:
        """The models that learn, by their names in checkpoints."""
        raise TypeError(f"{type(self).__name__} does not define learners")

    @property
    def checkpointed_models(self) -> Mapping[str, ScorerGroup[ModelWorker]]:
        """The models that a checkpoint holds."""
        return self.learners

    def input_digests(self) -> dict[str, str]:
        """Digests of what a resumed run reads again: here the configuration of the model that is trained, the weights
        below its adapter, and its tokenizer. See `skyrl.runs.input_digests`.
        """
        model, own = self.trained.model, self.cfg.trainer.tokenizer_path
        field = self.trained.path_of("model.path")
        tokenizer_field = field if own is None else self.cfg.trainer.path_of("tokenizer_path")
        result = model_digests(field, model, weights=bool(model.lora.rank))
        return result | model_file_digests(tokenizer_field, own or self.model_path, TOKENIZER)

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the model that is trained."""
        fast, own = not self.cfg.trainer.disable_fast_tokenizer, self.cfg.trainer.tokenizer_path
        return load_tokenizer(own or self.model_path, use_fast=fast, table=self.cfg.trainer.table_path)

    def get_processes(self) -> Processes:
        """Processes of the models."""
        return start_processes(self.cfg, retry=self.is_another_try)

    def prepare_processes(self, processes: Processes) -> None:
        """Does nothing. Override it to let processes that start later import their packages meanwhile."""

    def get_time_sharing(self) -> TimeSharing:
        """Time sharing of devices between models and engines; none by default."""
        return TimeSharing({}, None)

    def get_tracker(self, first_step: int) -> Tracker:
        """Trackers of metrics: the run folder, and those that the configuration names."""
        named = trackers_of(self.cfg.trainer, total_steps=self.total_steps, first_step=first_step)
        followers = [item for item in named if isinstance(item, Follower)]
        trackers = [entry for entry in named if not isinstance(entry, Follower)]
        timeline = Timeline(self.folder.timeline, self.progress, self.cfg.trainer.profile_steps, first_step)
        return WithLag([MetricsFile(self.folder.metrics), timeline, *trackers], followers)

    def get_loop(self, tracker: Tracker) -> TrainingLoop:
        """The training loop in its initial state."""
        raise TypeError(f"{type(self).__name__} does not define get_loop()")

    def get_alarms(self) -> Alarms:
        """The alarms of the configuration."""
        trainer = self.cfg.trainer
        return Alarms(alarms_of(trainer.alarms, defaults=trainer.default_alarms))

    def get_callbacks(self) -> Callbacks:
        """The callbacks that the configuration names, then `more_callbacks`. Raises `ConfigError`."""
        trainer = self.cfg.trainer
        callbacks = callbacks_by_name(trainer.callbacks, self.more_callbacks, field=trainer.path_of("callbacks"))
        return Callbacks(callbacks, total_steps=self.total_steps, folder=self.folder.path, say=notice)

    def report_alarm(self, raised: RaisedAlarm) -> None:
        """Report a raised alarm on the console and in the run's folder."""
        self.folder.alarms.append(attrs.asdict(raised))
        ends = " The run ends with this step." if raised.action == "stop" else ""
        self.progress.warning = f"step {raised.step}, alarm {raised.name}: {raised.reason}{ends}"
        notice(f"warning: {self.progress.warning}")

    def get_export(self, folder: Path) -> Callable[[Iterator[tuple[str, Tensor]]], None]:
        """Function that stores the gathered weights in `folder`."""
        return policy_export(self.cfg.trainer, self.trained, folder)

    # Methods that a session calls, besides the parts.

    def check_inputs(self) -> Mapping[str, object] | None:
        """Check data and models before anything is started. Returns the sandbox in which answers are judged, if any."""
        raise TypeError(f"{type(self).__name__} does not define check_inputs()")

    async def prepare(self) -> None:
        """Does nothing: this kind of run needs no preparation."""

    def begin_recording(self) -> None:
        """Does nothing: this kind of run records no steps."""

    async def close(self) -> None:
        """Does nothing: training holds no resources of its own."""

    @property
    def products(self) -> tuple[Path, ...]:
        """Files and folders of a finished run: the trained model, and its adapter if it has one."""
        lora = self.trained.model.lora
        return (self.folder.model, self.folder.adapter) if lora.rank else (self.folder.model,)

    async def finish(self) -> None:
        """Write the trained model into the run's folder."""
        await self.export(self.folder.model)

    async def export(self, folder: Path) -> None:
        """Write the current model in Hugging Face format, and its adapter beside it if it has one."""
        learner, lora = self.learners[self.role], self.trained.model.lora
        await self.time_sharing.for_learning(self.role)
        await learner.refuse_non_finite_state()
        await learner.export_weights(self.get_export(folder))
        if lora.rank:
            adapter = AdapterExport(like=self.model_path, lora=lora, folder=folder.with_name("adapter"))
            await learner.export_weights(adapter, adapter=True)

    def ranks_of(self, role: str, size: int, replicas: Replicas | None = None) -> tuple[Ranks, ...]:
        """The ranks of a role; a single rank needs no rendezvous. `replicas` says which compute on the same rows."""
        return (Ranks(name=role),) if size == 1 else self.rendezvous.ranks(role, size, replicas)

    @property
    def trained(self) -> LearnerConfig:
        """The table of the model that the run produces."""
        section: LearnerConfig = kind_of(self.cfg).trained.section(self.cfg)
        return section

    @property
    def model_path(self) -> str:
        """The model that training starts from."""
        return required(self.trained.model.path, self.trained.path_of("model.path"))

    @property
    def exports(self) -> Path:
        """Folder of the exported models."""
        return Path(self.cfg.trainer.folder("export_path")).expanduser().absolute()
