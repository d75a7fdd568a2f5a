"""Runs that learn from rows, put together: supervised fine-tuning here, reward models in `reward_model.py`.

As in `ppo.py`, each collaborator is made by its `get_...` method when it is first needed, and then kept.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from skyrl.batch import TrainingBatch
from skyrl.config import SFTConfig, SupervisedConfig, TrainerConfig
from skyrl.config.supervised.checks import evaluation_names
from skyrl.data.cursor import PromptCursor
from skyrl.data.order import InOrder, Mixed, Order
from skyrl.data.supervised_rows import Rows, load_supervised
from skyrl.errors import DataError
from skyrl.experiments.collaborators import start_processes
from skyrl.experiments.supervised_export import chat_tokenizer, export_of, new_turn_end
from skyrl.learners.budget import TokenBudget
from skyrl.learners.group import LearnerGroup
from skyrl.learners.ranks import Ranks, Rendezvous
from skyrl.learners.supervised import CrossEntropy
from skyrl.learners.workers import SFTWorker
from skyrl.models.loading import max_positions
from skyrl.models.storing import AdapterExport
from skyrl.processes.handles import Processes
from skyrl.processes.progress import Progress
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.runs.checkpoint_manager import CheckpointManager, checkpoint_store
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.supervised_session import SupervisedSession
from skyrl.tracking.factory import trackers_of
from skyrl.tracking.jsonlines import MetricsFile
from skyrl.tracking.timing import Clock, timed
from skyrl.tracking.tracker import LastMetrics, Tracker, Trackers
from skyrl.training.supervised import SupervisedTrainer
from skyrl.training.supervised_batches import collate_supervised
from skyrl.training.supervised_evaluation import SupervisedEvaluation, likelihood
from skyrl.training.time_sharing import TimeSharing
from skyrl.tree import required

SCORED_AT_A_TIME = 64
"""Rows of an evaluation that are put into one batch, at least; micro-batches bound what is computed at a time."""

UNBOUNDED = 1 << 20
"""Tokens of a row where neither the configuration nor the model has a bound."""


class SupervisedExp:
    """What supervised runs have in common."""

    role: ClassVar[str] = "policy"
    """Under which the model is kept in checkpoints."""

    recorded = None
    """Nothing is sampled, and so nothing was."""

    def __init__(self, cfg: SupervisedConfig) -> None:
        """`cfg` is resolved and checked: `skyrl.config.compose` gives one."""
        self.cfg = cfg
        self.progress = Progress()
        self.clock = Clock(self.progress.waiting_for)
        self.shutdown = ShutdownSignal(grace=cfg.faults.grace_period_seconds, stop_before=cfg.faults.stop_before)
        self.folder = RunFolder(Path(required(cfg.run_path, "run_path")).expanduser().absolute())
        self.checkpoints = checkpoint_store(cfg.trainer)
        self.is_another_try = False
        self.last = LastMetrics()
        self.held = ExitStack()
        self.time_sharing = TimeSharing({}, None)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's, with the configured chat template."""
        return chat_tokenizer(self.cfg)

    @cached_property
    def train_dataset(self) -> Rows[Any]:
        """The rows to train on. Raises `DataError` if they do not fill one batch."""
        rows = self.load(self.cfg.train_datasets)
        if len(rows) < self.cfg.batch_size:
            raise DataError(f"batch_size = {self.cfg.batch_size} rows, but the training data has {len(rows)}")
        return rows

    @cached_property
    def eval_datasets(self) -> dict[str, Rows[Any]]:
        """The rows to evaluate on, by the name of their set."""
        names = evaluation_names(self.cfg)
        return {name: self.load((source,)) for name, source in zip(names, self.cfg.eval_datasets, strict=True)}

    @cached_property
    def max_length(self) -> int:
        """Of a row, in tokens. Raises `DataError` for more than the model has positions."""
        positions = max_positions(self.model_path)
        if self.cfg.max_length is not None and positions is not None and self.cfg.max_length > positions:
            raise DataError(f"max_length = {self.cfg.max_length}, but the model has {positions} positions")
        return self.cfg.max_length or positions or UNBOUNDED

    @cached_property
    def processes(self) -> Processes:
        """Where the model lives."""
        with self.shutdown.at_any_point():  # a cluster may take minutes to answer, or never do
            processes = start_processes(self.cfg)
        processes.progress = self.progress
        self.held.callback(processes.close)
        return processes

    @cached_property
    def learner(self) -> LearnerGroup[Any]:
        """The model, on all its ranks."""
        return self.get_learner()

    @property
    def learners(self) -> dict[str, LearnerGroup[Any]]:
        """It, by the name that it has in checkpoints."""
        return {self.role: self.learner}

    @cached_property
    def saving(self) -> CheckpointManager:
        """What writes and reads checkpoints."""
        return CheckpointManager(self.cfg, self.checkpoints, self.learners, self.time_sharing, self.folder, self.last)

    @cached_property
    def total_steps(self) -> int:
        """Batches in all epochs, at most `num_steps`, and no more rows than `max_training_samples`."""
        cfg = self.cfg
        steps = cfg.num_epochs * (len(self.train_dataset) // cfg.batch_size)
        limits = [cfg.num_steps, cfg.max_training_samples and cfg.max_training_samples // cfg.batch_size]
        return min([steps, *(limit for limit in limits if limit is not None)])

    def load(self, sources: tuple[str, ...]) -> Rows[Any]:
        """Rows of this kind of run."""
        raise TypeError(f"{type(self).__name__} does not define load()")

    def get_learner(self) -> LearnerGroup[Any]:
        """The model that learns."""
        raise TypeError(f"{type(self).__name__} does not define get_learner()")

    def collate(self, rows: Any) -> TrainingBatch:
        """Rows as a batch."""
        raise TypeError(f"{type(self).__name__} does not define collate()")

    def get_evaluation(self) -> SupervisedEvaluation | None:
        """What measures the model on other rows, if there are any."""
        raise TypeError(f"{type(self).__name__} does not define get_evaluation()")

    def get_order(self) -> Order | None:
        """Of the rows in an epoch; None: shuffled."""
        cfg, rows = self.cfg, self.train_dataset
        if cfg.train_dataset_weights is not None:
            return Mixed(rows.sizes, cfg.train_dataset_weights, cfg.seed)
        return InOrder(len(rows)) if cfg.sampler == "sequential" else None

    def get_tracker(self, first_step: int) -> Tracker:
        """Where metrics go: the run folder, and the trackers that the configuration names."""
        named = trackers_of(self.cfg.trainer, total_steps=self.total_steps, first_step=first_step)
        return Trackers([MetricsFile(self.folder.metrics), *named])

    def get_loop(self, tracker: Tracker) -> SupervisedTrainer:
        """The loop."""
        cfg, rows = self.cfg, self.train_dataset
        cursor: PromptCursor[Any] = PromptCursor(
            rows.rows, cfg.batch_size, cfg.seed, order=self.get_order(), fingerprint=rows.fingerprint
        )
        trainer = SupervisedTrainer(
            cfg,
            cursor=cursor,
            collate=self.collate,
            learner=timed(self.learner, self.clock, update="update"),
            evaluation=self.get_evaluation(),
            tracker=tracker,
            clock=self.clock,
            total_steps=self.total_steps,
            shutdown=self.shutdown,
            save=lambda step: self.saving.save(step, trainer.state()),
            export=lambda step: self.export(self.exports / f"global_step_{step}" / "model"),
        )
        return trainer

    def run(self) -> bool:
        """Train to the end; False if an earlier session had already done so. Raises `Stopped` when told to stop."""
        return SupervisedSession(self).run()

    async def export(self, folder: Path) -> None:
        """The model as it is now, in Hugging Face format, and its adapter beside it where it has one."""
        await self.learner.refuse_non_finite_state()
        await self.learner.stream(self.get_export(folder))
        lora = self.cfg.model.lora
        if lora.rank:
            adapter = AdapterExport(like=self.model_path, lora=lora, folder=folder.with_name("adapter"))
            await self.learner.stream(adapter, adapter=True)

    def get_export(self, folder: Path) -> Any:
        """What stores the gathered weights."""
        return export_of(self.cfg, folder)

    @cached_property
    def turn_end(self) -> int | None:
        """A token that ends the turns that are learned, and at which the model's generation does not stop yet."""
        return new_turn_end(self.cfg, self.tokenizer)

    async def close(self, trainer: SupervisedTrainer) -> None:
        """There are no engines."""

    def ranks(self) -> tuple[Ranks, ...]:
        """Of the model; one alone meets nobody."""
        size = self.cfg.placement.num_nodes * self.cfg.placement.num_gpus_per_node
        if size == 1:
            return (Ranks(name=self.role),)
        rendezvous = Rendezvous(self.processes.host, timeout=self.cfg.placement.start_timeout_seconds)
        return self.held.enter_context(rendezvous).ranks(self.role, size)

    def budget(self) -> TokenBudget:
        """Of micro-batches. What belongs together stays together."""
        limit = self.cfg.max_tokens_per_microbatch
        return TokenBudget(tokens=limit if limit > 0 else None, keep_groups=True)

    @property
    def model_path(self) -> str:
        """Where training starts from."""
        return required(self.cfg.model.path, "model.path")

    @property
    def exports(self) -> Path:
        """Where exports go."""
        return Path(required(self.cfg.export_path, "export_path")).expanduser().absolute()


class SFTExp(SupervisedExp):
    """Supervised fine-tuning."""

    cfg: SFTConfig

    def load(self, sources: tuple[str, ...]) -> Rows[Any]:
        return load_supervised(sources, self.tokenizer, self.cfg, self.max_length)

    def collate(self, rows: Any) -> TrainingBatch:
        return collate_supervised(rows)

    def get_learner(self) -> LearnerGroup[Any]:
        trainer: TrainerConfig = self.cfg.trainer
        objective = CrossEntropy()
        makers = [partial(SFTWorker, trainer, objective, self.total_steps, ranks=ranks) for ranks in self.ranks()]
        return LearnerGroup(self.processes.start("policy", makers), objective, self.budget())

    def get_evaluation(self) -> SupervisedEvaluation | None:
        if not self.eval_datasets:
            return None
        sets = {name: dataset.rows for name, dataset in self.eval_datasets.items()}
        size = max(self.cfg.batch_size, SCORED_AT_A_TIME)
        return SupervisedEvaluation(sets, collate_supervised, likelihood, batch_size=size)
