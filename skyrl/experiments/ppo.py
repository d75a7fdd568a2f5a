"""A training run, put together: each collaborator is built from its own part of the configuration.

Subclass `BasePPOExp` and override one `get_...` to bring your own collaborator; override `get_config_cls` for a
configuration with fields of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyrl.checkpoint.handover import WeightFiles
from skyrl.checkpoint.shards import StoredTensors
from skyrl.checkpoint.storage import Disk
from skyrl.config import SkyRLTrainConfig
from skyrl.config.effects import evaluates
from skyrl.config.sizes import Model, grid_of, has_critic, has_reference, replicas_of
from skyrl.data.cursor import PromptCursor, batches
from skyrl.data.order import Mixed
from skyrl.data.prompts import PromptDataset, load_prompts
from skyrl.data.sources import Columns
from skyrl.errors import DataError
from skyrl.experiments.collaborators import (
    engine_makers,
    in_flight,
    parity_canary,
    start_processes,
    stream_limits,
    weight_road,
)
from skyrl.inference.client import InferenceEngineClient
from skyrl.inference.remote_engine import RemoteEngine
from skyrl.learners.group import LearnerGroup, ScorerGroup
from skyrl.learners.model_worker import token_budget
from skyrl.learners.ranks import Ranks, Rendezvous
from skyrl.learners.regression import ReturnRegression
from skyrl.learners.workers import CriticWorker, PolicyWorker, RefWorker
from skyrl.models.chat_templates import with_template
from skyrl.models.loading import load_tokenizer
from skyrl.models.storing import AdapterExport, Export
from skyrl.processes.handles import Processes
from skyrl.processes.progress import Progress
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.rollout.batches import Rollouts, SynchronousRollouts
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.streaming import StreamingRollouts
from skyrl.runs.checkpoint_manager import CheckpointManager, checkpoint_store
from skyrl.runs.recorded import NoEngines, RecordedRollouts, RecordedRun
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.session import RunSession
from skyrl.tracking.factory import trackers_of
from skyrl.tracking.jsonlines import MetricsFile, sample_records
from skyrl.tracking.timing import Clock, timed
from skyrl.tracking.tracker import LastMetrics, Tracker, Trackers
from skyrl.training.advantage import advantage_estimator, critic_targets
from skyrl.training.evaluation import Evaluation
from skyrl.training.loop import TrainingLoop
from skyrl.training.objective import policy_objective
from skyrl.training.shaping import reward_shaping
from skyrl.training.time_sharing import Movable, TimeSharing, run_before
from skyrl.training.trainer import PPOTrainer
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import required
from skyrl.tree.imports import import_object
from skyrl.weight_sync.publish import WeightSync


class BasePPOExp:
    """One run of policy-gradient training, in this process or spread over those of a Ray cluster.

    Each collaborator is made by its `get_...` method when it is first needed, and then kept.
    """

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        """`cfg` is resolved and checked: `skyrl.config.compose` gives one."""
        self.cfg = cfg
        self.progress = Progress()
        self.clock = Clock(self.progress.waiting_for)
        faults = cfg.trainer.faults
        self.shutdown = ShutdownSignal(grace=faults.grace_period_seconds, stop_before=faults.stop_before)
        self.folder = RunFolder(Path(required(cfg.trainer.run_path, "trainer.run_path")).expanduser().absolute())
        self.checkpoints = checkpoint_store(cfg.trainer)
        self.is_another_try = False
        """Has this command run it before, and did it fail? What that means is `trainer.recover_mode`'s business."""
        self.last = LastMetrics()
        self.held = ExitStack()

    @classmethod
    def get_config_cls(cls) -> type[SkyRLTrainConfig]:
        """The root class that files and arguments are read into."""
        return SkyRLTrainConfig

    # What a run is made of, kept once made. Override the method that makes it.

    @cached_property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    @cached_property
    def train_dataset(self) -> PromptDataset:
        return self.get_train_dataset()

    @cached_property
    def eval_dataset(self) -> PromptDataset | None:
        return self.get_eval_dataset()

    @cached_property
    def processes(self) -> Processes:
        with self.shutdown.at_any_point():  # a cluster may take minutes to answer, or never do
            processes = self.get_processes()
        processes.progress = self.progress
        self.held.callback(processes.close)
        return processes

    @cached_property
    def rendezvous(self) -> Rendezvous:
        return self.held.enter_context(
            Rendezvous(self.processes.host, timeout=self.cfg.trainer.placement.start_timeout_seconds)
        )

    @cached_property
    def client(self) -> InferenceEngineClient:
        return self.get_inference_client()

    @cached_property
    def generator(self) -> SkyRLGymGenerator:
        return self.get_generator()

    @cached_property
    def policy(self) -> LearnerGroup[PolicyWorker]:
        return self.get_policy()

    @cached_property
    def reference(self) -> ScorerGroup[RefWorker] | None:
        return self.get_reference()

    @cached_property
    def critic(self) -> LearnerGroup[CriticWorker] | None:
        return self.get_critic()

    @cached_property
    def time_sharing(self) -> TimeSharing:
        return self.get_time_sharing()

    @property
    def learners(self) -> dict[str, LearnerGroup[Any]]:
        """The models that learn, by name."""
        there = {"policy": self.policy, "critic": self.critic}
        return {name: learner for name, learner in there.items() if learner is not None}

    @property
    def changing(self) -> dict[str, ScorerGroup[Any]]:
        """The models that a checkpoint holds: those that learn, and the reference where it is refreshed."""
        models: dict[str, ScorerGroup[Any]] = {**self.learners}
        if self.reference and self.cfg.trainer.update_ref_every_epoch:
            models["ref"] = self.reference
        return models

    @cached_property
    def saving(self) -> CheckpointManager:
        """What writes and reads checkpoints of the models that change."""
        return CheckpointManager(self.cfg, self.checkpoints, self.changing, self.time_sharing, self.folder, self.last)

    @cached_property
    def recorded(self) -> RecordedRun | None:
        """The run whose samples this one is trained on, in place of engines; usually there is none."""
        source = self.cfg.trainer.rollouts_from
        return RecordedRun(Path(source).expanduser()) if source else None

    @cached_property
    def total_steps(self) -> int:
        """Batches in all epochs, at most `max_training_steps` and what `max_training_prompts` fills; those of the
        recording, where there is one.
        """
        trainer = self.cfg.trainer
        if self.recorded:
            return self.recorded.total_steps(at_most=trainer.max_training_steps)
        steps, _ = batches(len(self.train_dataset), trainer.train_batch_size, trainer.epochs, self.cfg.data.epoch_tail)
        limits = [trainer.max_training_steps]
        if trainer.max_training_prompts is not None:
            limits.append(trainer.max_training_prompts // trainer.train_batch_size)
        return min([steps, *(limit for limit in limits if limit is not None)])

    def get_tokenizer(self) -> Any:
        """The policy's tokenizer, with the chat template that is configured."""
        tokenizer = load_tokenizer(self._model_path, use_fast=not self.cfg.trainer.disable_fast_tokenizer)
        return with_template(tokenizer, self.cfg.generator.chat_template)

    def get_train_dataset(self) -> PromptDataset:
        """The prompts to train on. Raises `DataError` if they do not fill one batch."""
        dataset = self._load(self.cfg.data.train_data)
        batch = self.cfg.trainer.train_batch_size
        if len(dataset) < batch:
            raise DataError(
                f"trainer.train_batch_size = {batch} prompts, but the training data has {len(dataset)}"
                + (f" ({dataset.too_long} more are longer than trainer.max_prompt_length)" if dataset.too_long else "")
            )
        return dataset

    def get_eval_dataset(self) -> PromptDataset | None:
        """The prompts to evaluate on, or None if this run never evaluates."""
        return self._load(self.cfg.data.val_data) if evaluates(self.cfg) else None

    def get_processes(self) -> Processes:
        """Where models and engines live."""
        return start_processes(self.cfg)

    def get_inference_client(self) -> InferenceEngineClient:
        """The engines that sample, each with weights of its own."""
        handles = self.processes.start("engine", engine_makers(self.cfg)).handles
        return InferenceEngineClient(
            [RemoteEngine(handle) for handle in handles],
            self.tokenizer,
            self._model_path,
            self.cfg.trainer.policy.model.lora,
            self.cfg.generator.inference_engine,
            in_flight=in_flight(self.cfg),
        )

    def get_generator(self) -> SkyRLGymGenerator:
        """What turns prompts into rewarded trajectories."""
        return SkyRLGymGenerator(
            self._model_path,
            self.cfg.trainer.policy.model.lora,
            self.cfg.generator,
            self.cfg.environment.skyrl_gym,
            self.client,
            self.tokenizer,
            user_env_class=self.cfg.environment.env_class,
            seed=self.cfg.trainer.seed,
        )

    def get_policy(self) -> LearnerGroup[PolicyWorker]:
        """The model that learns, on all its ranks."""
        trainer = self.cfg.trainer
        updates = trainer.update_epochs_per_batch * (trainer.train_batch_size // trainer.policy_mini_batch_size)
        objective = policy_objective(trainer.algorithm, micro_batch_rows=trainer.micro_train_batch_size_per_gpu)
        makers = [
            partial(PolicyWorker, trainer, objective, self.total_steps * updates, ranks=ranks)
            for ranks in self._ranks("policy")
        ]
        ranks, replicas = self.processes.start("policy", makers), replicas_of(self.cfg, "policy")
        return LearnerGroup(ranks, objective, token_budget(trainer), replicas=replicas)

    def get_reference(self) -> ScorerGroup[RefWorker] | None:
        """The model that the KL term measures the distance from, if there is a KL term."""
        if not has_reference(self.cfg):
            return None
        makers = [partial(RefWorker, self.cfg.trainer, ranks=ranks) for ranks in self._ranks("ref")]
        ranks, replicas = self.processes.start("ref", makers), replicas_of(self.cfg, "ref")
        return ScorerGroup(ranks, token_budget(self.cfg.trainer), replicas=replicas)

    def get_critic(self) -> LearnerGroup[CriticWorker] | None:
        """The model that predicts returns, on all its ranks, if there is one."""
        if not has_critic(self.cfg):
            return None
        trainer = self.cfg.trainer
        updates = trainer.update_epochs_per_batch * (trainer.train_batch_size // trainer.critic_mini_batch_size)
        objective = ReturnRegression(value_clip=trainer.algorithm.value_clip)
        makers = [
            partial(CriticWorker, trainer, objective, self.total_steps * updates, ranks=ranks)
            for ranks in self._ranks("critic")
        ]
        ranks, replicas = self.processes.start("critic", makers), replicas_of(self.cfg, "critic")
        return LearnerGroup(ranks, objective, token_budget(trainer), replicas=replicas)

    def get_time_sharing(self) -> TimeSharing:
        """Who makes room for whom, where models or engines share devices."""
        placement = self.cfg.trainer.placement
        there = {"policy": self.policy, "ref": self.reference, "critic": self.critic}
        models: dict[str, Movable] = {name: model for name, model in there.items() if model is not None}
        share = placement.colocate_all or (placement.colocate_policy_ref and len(models) > 1)
        return TimeSharing(
            models if share else {},
            (lambda: self.client) if placement.colocate_all and not self.recorded else None,
            keep_optimizers=[
                name
                for name, of_model in (("policy", self.cfg.trainer.policy), ("critic", self.cfg.trainer.critic))
                if not of_model.optimizer_config.offload_after_step
            ],
        )

    def get_weight_sync(self, rollouts: Rollouts) -> WeightSync | NoEngines:
        """The road from the policy to the engines, where there are any; `rollouts` are told of what arrives."""
        if self.recorded:
            return NoEngines()
        prompts = [prompt.token_ids for prompt in self.train_dataset.prompts]
        transport = weight_road(self.cfg, self.rendezvous, self.folder.path / "weights")
        asynchronous = self.cfg.trainer.fully_async
        return WeightSync(
            self.policy,
            self.client,
            transport,
            parity_canary(self.cfg, prompts),
            arrived=rollouts.weights_are,
            interval=asynchronous.steps_per_sync if asynchronous.enabled else 1,
        )

    def get_rollouts(self) -> Rollouts:
        """What `next_batch` is asked of."""
        trainer = self.cfg.trainer
        if self.recorded:
            return RecordedRollouts(self.recorded.recording, trainer.train_batch_size)
        data, dataset = self.cfg.data, self.train_dataset
        mixed = None if data.train_weights is None else Mixed(dataset.sizes, data.train_weights, trainer.seed)
        cursor = PromptCursor(
            dataset.prompts,
            trainer.train_batch_size,
            trainer.seed,
            order=mixed,
            tail=data.epoch_tail,
            fingerprint=dataset.fingerprint,
        )
        generator, algorithm, seed = self.cfg.generator, trainer.algorithm, trainer.seed
        if not trainer.fully_async.enabled:
            return SynchronousRollouts(cursor, self.generator, generator, algorithm, seed=seed)
        accept = trainer.fully_async.accept
        return StreamingRollouts(
            cursor,
            dataset.prompts,
            self.generator,
            generator,
            algorithm,
            stream_limits(self.cfg, self.total_steps),
            accept=None if accept is None else import_object(accept),
            mask_older_tokens=trainer.fully_async.mask_older_tokens,
            seed=seed,
            waits=self.progress.waits,
        )

    def get_evaluation(self) -> Evaluation | None:
        """What measures the policy on other prompts, if this run evaluates."""
        if self.eval_dataset is None:
            return None
        trainer = self.cfg.trainer
        return Evaluation(
            self.eval_dataset.prompts,
            self.generator,
            self.cfg.generator,
            batch_size=trainer.eval_batch_size,
            dump_folder=self.exports / "dumped_evals" if trainer.dump_eval_results else None,
            decode=self._decode,
        )

    def get_tracker(self, first_step: int) -> Tracker:
        """Where metrics go: the run folder, and the trackers that the configuration names."""
        named = trackers_of(self.cfg.trainer, total_steps=self.total_steps, first_step=first_step)
        return Trackers([MetricsFile(self.folder.metrics), *named])

    def get_trainer(self, rollouts: Rollouts, sync: WeightSync | NoEngines) -> PPOTrainer:
        """The algorithm with its collaborators, each in its turn, and timed."""
        turns = self.time_sharing

        async def for_sampling() -> None:
            if sync.is_missing:  # learners worked since the weights were sent: a checkpoint was saved, for example
                await turns.for_travel("policy")
                await sync.catch_up()
            await turns.for_engines()

        policy = run_before(
            self.policy, score=partial(turns.for_scoring, "policy"), update=partial(turns.for_learning, "policy")
        )
        reference = self.reference and run_before(self.reference, score=partial(turns.for_scoring, "ref"))
        critic = self.critic and run_before(
            self.critic, score=partial(turns.for_scoring, "critic"), update=partial(turns.for_learning, "critic")
        )
        algorithm = self.cfg.trainer.algorithm
        weights = run_before(sync, publish=partial(turns.for_travel, "policy"))
        return PPOTrainer(
            self.cfg.trainer,
            rollouts=timed(run_before(rollouts, next_batch=for_sampling), self.clock, next_batch="generate"),
            policy=timed(policy, self.clock, score="policy_logprobs", update="policy_train"),
            reference=reference and timed(reference, self.clock, score="ref_logprobs"),
            critic=critic and timed(critic, self.clock, score="values", update="critic_train"),
            weights=timed(weights, self.clock, publish="sync_weights"),
            shape=reward_shaping(algorithm),
            estimate=advantage_estimator(algorithm),
            targets=critic_targets(algorithm),
        )

    def get_loop(self, tracker: Tracker) -> TrainingLoop:
        """The loop: when a step is taken, and what comes before and after it."""
        turns, evaluation, rollouts = self.time_sharing, self.get_evaluation(), self.get_rollouts()
        sync = self.get_weight_sync(rollouts)

        async def for_evaluation() -> None:
            if sync.is_behind:
                await turns.for_travel("policy")
                await sync.catch_up()
            await turns.for_engines()

        return TrainingLoop(
            self.cfg.trainer,
            self.get_trainer(rollouts, sync),
            evaluation=evaluation and run_before(evaluation, run=for_evaluation),
            tracker=tracker,
            clock=self.clock,
            total_steps=self.total_steps,
            shutdown=self.shutdown,
            checkpoints=self.saving,
            export=lambda step: self.export(self.exports / f"global_step_{step}" / "policy"),
            refresh_reference=self.refresh_reference,
            on_samples=self._record_samples,
        )

    def run(self) -> bool:
        """Train to the end; False if an earlier session had already done so. What was saved stays, whatever happens.

        Raises `Stopped` when a signal or the deadline ends it before.
        """
        return RunSession(self).run()

    async def close(self, loop: TrainingLoop) -> None:
        """Let go of the rollouts and of the engines, once training is over."""
        await loop.trainer.rollouts.close()
        if not self.recorded:
            await self.client.close()

    async def refresh_reference(self) -> None:
        """The reference, if there is one, becomes the policy as it is now; an adapter is merged into what it gets."""
        if self.reference is None:
            return
        with TemporaryDirectory(prefix=".reference_", dir=self.folder.path) as scratch:  # all ranks see this folder
            storage = Disk(Path(scratch))
            await self.time_sharing.for_scoring("policy")
            files = await self.policy.stream(WeightFiles(storage=storage, folder="policy"))
            await self.time_sharing.for_scoring("ref")
            await self.reference.load_state(StoredTensors(storage, "policy", files), {})

    async def export(self, folder: Path) -> None:
        """The policy as it is now, in Hugging Face format, and its adapter beside it where it has one."""
        await self.time_sharing.for_learning("policy")
        await self.policy.refuse_non_finite_state()
        fast = not self.cfg.trainer.disable_fast_tokenizer
        await self.policy.stream(Export(like=self._model_path, use_fast_tokenizer=fast, folder=folder))
        lora = self.cfg.trainer.policy.model.lora
        if lora.rank:
            adapter = AdapterExport(like=self._model_path, lora=lora, folder=folder.with_name("adapter"))
            await self.policy.stream(adapter, adapter=True)

    def _ranks(self, role: Model) -> tuple[Ranks, ...]:
        """The ranks of a role; one alone meets nobody."""
        size = grid_of(self.cfg, role).ranks
        return (Ranks(name=role),) if size == 1 else self.rendezvous.ranks(role, size, replicas_of(self.cfg, role))

    def _record_samples(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        for record in sample_records(step, groups, self._decode):
            self.folder.trajectories.append(record)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _load(self, sources: Sequence[str]) -> PromptDataset:
        return load_prompts(
            sources,
            self.tokenizer,
            env_class=self.cfg.environment.env_class,
            max_prompt_length=self.cfg.trainer.max_prompt_length,
            chat_template_kwargs=self.cfg.generator.chat_template_kwargs,
            columns=Columns(prompt=self.cfg.data.prompt_column, answer=self.cfg.data.answer_column),
            skip_bad_rows=self.cfg.data.bad_rows == "skip",
        )

    @property
    def _model_path(self) -> str:
        return required(self.cfg.trainer.policy.model.path, "trainer.policy.model.path")

    @property
    def exports(self) -> Path:
        """Where exports of the policy go."""
        return Path(self.cfg.trainer.export_path).expanduser().absolute()
