"""Policy-gradient training runs: each collaborator is built from its own part of the configuration.

Subclass `BasePPOExp` and override one `get_...` to bring your own collaborator; override `get_config_cls` for a
configuration with fields of your own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ParamSpec, TypeVar

from skyrl.batch import TEACHER_HIDDEN
from skyrl.checkpoint.shards import StoredTensors, WeightFiles
from skyrl.config import ModelConfig, SkyRLTrainConfig
from skyrl.config.derive.model_overrides import learner_overrides
from skyrl.config.derive.rl_models import (
    TEACHER,
    distills,
    gives_distributions,
    gives_whole_distributions,
    has_critic,
    has_local_teacher,
    has_reference,
    moves_teacher,
)
from skyrl.config.derive.sizes import Model, grid_of, on_ray, replicas_of, starts_engines
from skyrl.errors import UserError
from skyrl.experiments.factories import (
    close_teachers,
    connect_teachers,
    engine_makers,
    longest_sequence,
    parity_canary,
    rollout_parity,
    served_teacher,
    weight_transport,
)
from skyrl.experiments.full_length import fit_report, full_length_rollouts, probe_run
from skyrl.experiments.policy_sampling import PolicySampling
from skyrl.experiments.sampling import prompt_cursor, sampled_rollouts, steps_that_prompts_fill, stream_cursor
from skyrl.learners.workers.group import LearnerGroup, ScorerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.learners.workers.model_worker import ModelWorker, token_budget
from skyrl.learners.workers.objectives import ReturnRegression
from skyrl.learners.workers.roles import (
    CriticWorker,
    NormalizedCritic,
    PolicyWorker,
    RefWorker,
    TeachersWorker,
    TeacherWorker,
    hidden_of_teachers,
    ranks_of_teacher,
)
from skyrl.models.files.loading import max_positions
from skyrl.processes.handles import Group, Processes
from skyrl.processes.redaction import redacted
from skyrl.rollout.batches import Rollouts
from skyrl.rollout.constant_rewards import STEPS, ConstantRewards, endings
from skyrl.rollout.hints import Hints, with_hints
from skyrl.runs.input_digests import adapter_digests, model_digests
from skyrl.runs.inputs import notice
from skyrl.runs.recorded import NoEngines, RecordedRollouts, made_with, weight_digests_of
from skyrl.storage.disk import Disk
from skyrl.tracking.recording import BatchDump
from skyrl.tracking.sample_files import SampleSink
from skyrl.tracking.tracker import Tracker
from skyrl.training.advantage import advantages_of, critic_targets, reward_shaping
from skyrl.training.guards import FiniteNumbers, NonFiniteGuard
from skyrl.training.loop import Hooks, TrainingLoop
from skyrl.training.middleware import (
    Call,
    LayeredLearner,
    LayeredPublisher,
    LayeredRollouts,
    LayeredScorer,
    ProfiledSteps,
    in_context,
    layered,
    run_after,
    run_before,
    with_listeners,
)
from skyrl.training.objective import policy_objective
from skyrl.training.online_dpo import ranked_pairs_of
from skyrl.training.step_trace import Sink, StepTrace
from skyrl.training.teacher import (
    LocalTeacher,
    Scoring,
    ServedTeacher,
    Teacher,
    TeacherBehindHints,
    TeacherOfDistributions,
    TeacherOfLikelyTokens,
    TeacherOfTokens,
    TeachersBySource,
    no_row_message,
    no_teacher_message,
)
from skyrl.training.time_sharing import Movable, TimeSharing, is_room_for_all
from skyrl.training.trainer import PPOTrainer, RolloutPosition
from skyrl.trajectory import TrajectoryGroup
from skyrl.weight_sync.publish import ReplacementSync, WeightSync

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class BasePPOExp(PolicySampling):
    """One run of policy-gradient training, in this process or spread over those of a Ray cluster.

    Each collaborator is made by its `get_...` method when it is first needed, and then kept.
    """

    cfg: SkyRLTrainConfig

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        """`cfg` is resolved and checked: `skyrl.config.compose` gives one."""
        super().__init__(probe_run(cfg) if cfg.trainer.num_dummy_steps else cfg)

    @classmethod
    def get_config_cls(cls) -> type[SkyRLTrainConfig]:
        """The root class for a script to read files and arguments into: `compose(files, root=Exp.get_config_cls())`."""
        return SkyRLTrainConfig

    # The parts of a run, cached once made. Override the method that makes one.

    @cached_property
    def policy(self) -> LearnerGroup[PolicyWorker]:
        return self.get_policy()

    @cached_property
    def reference(self) -> ScorerGroup[RefWorker] | None:
        return self.get_reference()

    @cached_property
    def local_teachers(self) -> dict[str, ScorerGroup[TeacherWorker]]:
        return self.get_local_teachers()

    @cached_property
    def served_teachers(self) -> dict[str | None, ServedTeacher]:
        """The teachers behind servers by data source; that of all other rows under None."""
        endpoint = self.cfg.trainer.teacher.endpoint
        urls: dict[str | None, str] = dict(endpoint.sources.items())
        if endpoint.url:
            urls = {None: endpoint.url, **urls}
        return {source: served_teacher(endpoint, url) for source, url in urls.items()}

    @cached_property
    def critic(self) -> LearnerGroup[CriticWorker] | None:
        return self.get_critic()

    @cached_property
    def hints(self) -> Hints | None:
        """Hints that the teacher reads before answers; None if it reads what the policy reads."""
        return self.get_hints()

    @cached_property
    def rollouts(self) -> Rollouts:
        return self.get_rollouts()

    @cached_property
    def total_steps(self) -> int:
        """Number of batches in all epochs, at most `max_training_steps` and what `max_training_prompts` fills; that of
        the recording or of made-up steps for runs that use these.
        """
        if self.cfg.trainer.num_dummy_steps:
            return self.cfg.trainer.num_dummy_steps
        if self.recorded:
            return self.recorded.total_steps(at_most=self.cfg.trainer.max_training_steps)
        return steps_that_prompts_fill(self.cfg, len(self.train_dataset))

    @property
    def learners(self) -> dict[str, LearnerGroup[LearningWorker]]:
        """The models that learn, by name."""
        models: dict[str, LearnerGroup[LearningWorker] | None] = {"policy": self.policy, "critic": self.critic}
        return {name: learner for name, learner in models.items() if learner is not None}

    @property
    def checkpointed_models(self) -> dict[str, ScorerGroup[ModelWorker]]:
        """The models that a checkpoint holds: those that learn, and a reference or a teacher that follows them."""
        models: dict[str, ScorerGroup[ModelWorker]] = {**self.learners}
        if self.reference and self.cfg.trainer.update_ref_every_epoch:
            models["ref"] = self.reference
        if moves_teacher(self.cfg):
            models[TEACHER.stored_as] = self.local_teachers[str(self.cfg.trainer.teacher.model.path)]
        return models

    def check_inputs(self) -> Mapping[str, object] | None:
        """Check prompts, their sampler and models. Returns the sandbox in which answers are judged, if any."""
        sandbox = super().check_inputs()
        if not self.recorded and not self.cfg.trainer.num_dummy_steps:
            prompt_cursor(self.cfg, self.train_dataset)  # a sampler that cannot be made is refused now
            if self.hints is not None:
                self.hints.refuse_missing(self.train_dataset.facts.columns.values())
        return sandbox

    def digests_beside_policy(self) -> dict[str, str]:
        """Digests of the models beside the policy; of those that no checkpoint holds with their weights."""
        trainer, result = self.cfg.trainer, dict[str, str]()
        if has_reference(self.cfg) and not trainer.update_ref_every_epoch:
            ref = trainer.ref.model
            result |= model_digests("trainer.ref.model.path", ref, weights=True)
            result |= adapter_digests("trainer.ref.model.lora.path", ref)
        if has_local_teacher(self.cfg):
            teacher = trainer.teacher
            if teacher.model.path:
                stays = not moves_teacher(self.cfg)  # else a checkpoint has its weights
                result |= model_digests("trainer.teacher.model.path", teacher.model, weights=stays)
                result |= adapter_digests("trainer.teacher.model.lora.path", teacher.model)
            for source, path in teacher.sources.items():
                result |= model_digests(f"trainer.teacher.sources.{source}", ModelConfig(path=path), weights=True)
        if has_critic(self.cfg):
            critic = trainer.critic.model
            result |= model_digests("trainer.critic.model.path", critic, weights=bool(critic.lora.rank))
        return result

    def prepare_processes(self, processes: Processes) -> None:
        """Let the engines and the models that start after the policy import their packages while it starts."""
        models: tuple[tuple[Model, Callable[..., object], bool], ...] = (
            ("ref", RefWorker, has_reference(self.cfg)),
            ("teacher", TeachersWorker, has_local_teacher(self.cfg)),
            ("critic", CriticWorker, has_critic(self.cfg)),
        )
        for role, worker, is_needed in models:
            if is_needed:
                processes.prepare(role, [worker] * grid_of(self.cfg, role).ranks)
        if starts_engines(self.cfg) and not self.recorded:
            processes.prepare("engine", engine_makers(self.cfg))

    def get_policy(self) -> LearnerGroup[PolicyWorker]:
        """The model that learns, on all its ranks."""
        trainer = self.cfg.trainer
        updates = trainer.update_epochs_per_batch * (trainer.train_batch_size // trainer.policy_mini_batch_size)
        ranks = self._start("policy", PolicyWorker, self.total_steps * updates)
        return LearnerGroup(ranks, token_budget(trainer), replicas=replicas_of(self.cfg, "policy"))

    def get_objective(self) -> Objective:
        """Objective that the policy minimizes."""
        trainer = self.cfg.trainer
        return policy_objective(
            trainer.algorithm,
            micro_batch_rows=trainer.micro_train_batch_size_per_gpu,
            has_teacher=distills(self.cfg),
        )

    def get_reference(self) -> ScorerGroup[RefWorker] | None:
        """The model that the policy is compared with, by a KL term or by its loss, if either does."""
        if not has_reference(self.cfg):
            return None
        ranks = self._start("ref", RefWorker)
        return ScorerGroup(ranks, token_budget(self.cfg.trainer), replicas=replicas_of(self.cfg, "ref"))

    def get_local_teachers(self) -> dict[str, ScorerGroup[TeacherWorker]]:
        """The models in the run that the policy is distilled from, by path. Each is on all ranks of their role."""
        if not has_local_teacher(self.cfg):
            return {}
        ranks, replicas = self._start("teacher", TeachersWorker), replicas_of(self.cfg, "teacher")
        return {
            path: ScorerGroup(ranks_of_teacher(ranks, path), token_budget(self.cfg.trainer), replicas=replicas)
            for path in self.cfg.trainer.teacher.local_paths
        }

    def get_critic(self) -> LearnerGroup[CriticWorker] | None:
        """The model that predicts returns, on all its ranks, if there is one."""
        if not has_critic(self.cfg):
            return None
        trainer = self.cfg.trainer
        updates = trainer.update_epochs_per_batch * (trainer.train_batch_size // trainer.critic_mini_batch_size)
        ranks = self._start("critic", CriticWorker, self.total_steps * updates)
        group_class = NormalizedCritic if trainer.algorithm.normalize_values else LearnerGroup[CriticWorker]
        return group_class(ranks, token_budget(trainer), replicas=replicas_of(self.cfg, "critic"))

    def get_hints(self) -> Hints | None:
        """Puts hints into the prompts that the teacher reads, if there are any."""
        settings, trainer = self.cfg.trainer.algorithm.distillation.hint, self.cfg.trainer
        if not distills(self.cfg) or settings.source == "none" or trainer.num_dummy_steps:
            return None
        teacher_configs = [trainer.teacher.of(path) for path in trainer.teacher.local_paths]
        limits = [
            max_positions(str(table.model.path), learner_overrides(trainer, table))
            for table in teacher_configs or (trainer.policy,)
        ]
        positions = min((length for length in limits if length is not None), default=None)
        arguments = self.cfg.generator.chat_template_kwargs
        return Hints(settings=settings, tokenizer=self.tokenizer, template_kwargs=arguments, positions=positions)

    def get_critic_objective(self) -> Objective:
        """Objective that the critic minimizes."""
        return ReturnRegression(value_clip=self.cfg.trainer.algorithm.value_clip)

    def get_time_sharing(self) -> TimeSharing:
        """Time sharing of devices between models and engines."""
        placement = self.cfg.trainer.placement
        of_teachers = {self._device_name_of(path): teacher for path, teacher in self.local_teachers.items()}
        scorers = {"policy": self.policy, "ref": self.reference, "critic": self.critic, **of_teachers}
        models: dict[str, Movable] = {name: model for name, model in scorers.items() if model is not None}
        share = placement.colocate_all or (placement.colocate_policy_ref and len(models) > 1)
        single_process = placement.executor == "in_process" and self.cfg.trainer.device == "cuda"
        if share and single_process and is_room_for_all():
            _log.info("the GPU holds all models and the engine at once: nothing is moved between the steps' parts")
            return TimeSharing({}, None)
        return TimeSharing(
            models if share else {},
            (lambda: self.client) if placement.colocate_all and starts_engines(self.cfg) else None,
            keep_optimizers=[
                name
                for name, of_model in (("policy", self.cfg.trainer.policy), ("critic", self.cfg.trainer.critic))
                if not of_model.optimizer_config.offload_after_step
            ],
        )

    def get_weight_sync(self, rollouts: Rollouts) -> WeightSync | NoEngines:
        """Weight transfer from the policy to the engines; `rollouts` are informed of each version."""
        if self.recorded:
            return NoEngines()
        prompts = (prompt.token_ids for prompt in self.train_dataset.prompts)
        transport = weight_transport(self.cfg, self.rendezvous, self.folder.path / "weights")
        asynchronous = self.cfg.trainer.fully_async
        return WeightSync(
            self.policy,
            self.client,
            transport,
            parity_canary(self.cfg, prompts),
            on_version=rollouts.set_weights_version,
            interval=asynchronous.steps_per_sync if asynchronous.enabled else 1,
            canary_interval=self.cfg.generator.inference_engine.logprob_parity_interval,
            until_stopped=self.shutdown.in_time,
        )

    def get_rollouts(self) -> Rollouts:
        """Source of training batches."""
        if self.cfg.trainer.num_dummy_steps:
            return full_length_rollouts(self.cfg, len(self.tokenizer))
        if self.recorded:
            return RecordedRollouts(self.recorded.recording, self.cfg.trainer.train_batch_size)
        streaming = self.cfg.data.streaming
        return sampled_rollouts(
            self.cfg,
            stream_cursor(self.cfg, self.tokenizer) if streaming else prompt_cursor(self.cfg, self.train_dataset),
            self.generator,
            total_steps=self.total_steps,
            describe_waits=self.progress.waits,
        )

    @cached_property
    def sample_sink(self) -> SampleSink:
        """Sink of the samples that are kept for people, written in the background."""
        return self.folder.samples.sink(self.decode, self.cfg.trainer.samples_per_step_kept)

    def get_sinks(self) -> list[Sink]:
        """Receivers of the results of a step: the samples for people, and dumps and a recording if configured."""
        form = self.cfg.trainer.recording
        recording = [] if form == "off" else [self.folder.recording(compress=form == "jsonl.gz")]
        dumps = [BatchDump(self.exports / "dumped_data")] if self.cfg.trainer.dump_data_batch else []
        return [self.sample_sink, *dumps, *recording]

    def get_trainer(self, rollouts: Rollouts, sync: WeightSync | NoEngines) -> PPOTrainer:
        """The algorithm with its collaborators, and the layers of every call. The first argument of `layered` is the
        method, in its innermost layers; the others follow, the outermost first.
        """
        sharing, clock, algorithm = self.time_sharing, self.clock, self.cfg.trainer.algorithm
        shaping, finite_check, parity = reward_shaping(algorithm), FiniteNumbers(), rollout_parity(self.cfg)
        pairs = ranked_pairs_of(self.cfg.trainer)
        answers = self.cfg.generator.n_samples_per_prompt
        estimate_advantages = pairs.pair_counts if pairs else advantages_of(self.cfg.trainer, answers)
        position = RolloutPosition(rollouts, shaping)
        sinks = self.get_sinks()
        without_digests = all(isinstance(sink, SampleSink | BatchDump) for sink in sinks)
        digests = {} if without_digests else weight_digests_of(self.learners, sharing)
        trace = StepTrace(sinks, rollouts, digests, clock)
        interruptible = in_context(self.shutdown.interruptible)
        profiled = ProfiledSteps(self.cfg.trainer.profile_steps, self.folder.profile)

        ended = partial(endings, config=self.cfg.generator, agent=self.cfg.environment.agent)
        samples = self.folder.path / "trajectories.jsonl"
        constant_reward_warning = ConstantRewards(notice, samples, steps=min(STEPS, self.total_steps), endings=ended)

        def learner(name: str, model: LearnerGroup[LearningWorker], scoring: str, learning: str) -> LayeredLearner:
            on_device = run_before(partial(sharing.for_learning, name))
            measured = in_context(partial(clock.measure, learning))
            return LayeredLearner(
                score=self._scoring(name, model.score, scoring),
                forward_backward=layered(
                    parity.around(model.forward_backward),
                    profiled.around(model),
                    measured,
                    on_device,
                    on_result=[trace.on_forward_backward(name)],
                ),
                optimizer_step=layered(
                    model.optimizer_step, measured, on_device, on_result=[trace.on_optimizer_step(name)]
                ),
            )

        def keep_samples(groups: Sequence[TrajectoryGroup], version: int) -> None:
            self._record_samples(version + 1, groups)

        teacher, reference = self._teacher_of_rows() if distills(self.cfg) else None, self.reference
        return PPOTrainer(
            trainer_cfg=self.cfg.trainer,
            rollouts=LayeredRollouts(
                next_batch=layered(
                    self._with_engine_replacement(with_hints(rollouts.next_batch, self.hints), sync),
                    run_after(self._samples_written),
                    interruptible,
                    in_context(partial(clock.measure, "generate")),
                    run_before(partial(self._ready_to_sample, sync)),
                    on_result=[
                        finite_check.remember_groups,
                        position.count,
                        constant_reward_warning.count,
                        parity.sampled,
                        keep_samples,
                        trace.sampled,
                        profiled.sampled,
                        self.callbacks.rollouts,
                    ],
                ),
                metrics=rollouts.metrics,
            ),
            policy=learner("policy", self.policy, "policy_logprobs", "policy_train"),
            reference=reference and LayeredScorer(score=self._scoring("ref", reference.score, "ref_logprobs")),
            teacher=teacher if teacher is None or self.hints is None else TeacherBehindHints(teacher),
            critic=self.critic and learner("critic", self.critic, "values", "critic_train"),
            objective=self.get_objective(),
            critic_objective=self.get_critic_objective(),
            weights=LayeredPublisher(
                publish=layered(
                    sync.publish,
                    trace.before_publishing,
                    in_context(partial(clock.measure, "sync_weights")),
                    run_before(partial(sharing.for_transfer, "policy")),
                    on_result=[self.callbacks.weights_sent],
                )
            ),
            shape_rewards=with_listeners(shaping, before=[trace.keep, finite_check.refuse]),
            estimate_advantages=with_listeners(
                estimate_advantages,
                before=[trace.keep, finite_check.refuse],
                after=[finite_check.refuse_advantages, trace.keep_advantages],
            ),
            pairs=pairs,
            critic_targets=with_listeners(critic_targets(algorithm), after=[trace.keep_returns]),
            position=position,
        )

    def _scoring(self, name: str, call: Call[P, R], timing: str) -> Call[P, R]:
        """A call that scores a batch by the model `name`, with its turn on the devices and its time."""
        on_device = run_before(partial(self.time_sharing.for_scoring, name))
        measured = in_context(partial(self.clock.measure, timing))
        return layered(call, in_context(self.shutdown.interruptible), measured, on_device)

    def _teacher_of_rows(self) -> Teacher:
        """Puts the scores of teachers into the rows of a batch."""
        algorithm, settings = self.cfg.trainer.algorithm, self.cfg.trainer.teacher
        ready, names = self.time_sharing.for_scoring, hidden_of_teachers(settings)
        local: dict[str | None, Scoring] = {
            path: LocalTeacher(model=model, ready=partial(ready, self._device_name_of(path)), hidden_name=names[path])
            for path, model in self.local_teachers.items()
        }
        default = self.served_teachers.get(None) or local.get(settings.model.path)
        if algorithm.distillation.self_teacher:
            default = LocalTeacher(model=self.policy, ready=partial(ready, "policy"), hidden_name=TEACHER_HIDDEN)
        served = {source: teacher for source, teacher in self.served_teachers.items() if source is not None}
        named = {source: local[path] for source, path in settings.sources.items()} | served
        by_source = TeachersBySource(default=default, named=named)
        interruptible = in_context(self.shutdown.interruptible)
        measured = in_context(partial(self.clock.measure, "teacher"))
        if gives_whole_distributions(self.cfg):
            return TeacherOfDistributions(layered(by_source.hidden, interruptible, measured))
        if gives_distributions(self.cfg):
            return TeacherOfLikelyTokens(
                settings=algorithm.distillation,
                teacher=layered(by_source.token_logprobs, interruptible, measured),
                policy=self._scoring("policy", self.policy.token_logprobs, "policy_likeliest"),
            )
        return TeacherOfTokens(layered(by_source.score, interruptible, measured))

    def get_loop(self, tracker: Tracker) -> TrainingLoop:
        """The training loop around the trainer, with the hooks that run before and after a step."""
        evaluation, sync = self.get_evaluation(), self.get_weight_sync(self.rollouts)
        trainer = self.get_trainer(self.rollouts, sync)
        newest = run_before(partial(self._ready_to_sample, sync, newest=True))
        return TrainingLoop(
            self.cfg.trainer,
            trainer,
            Hooks(
                evaluate=None
                if evaluation is None
                else layered(self._with_engine_replacement(evaluation.run, sync), newest),
                export=lambda step: self.export(self.exports / f"global_step_{step}" / "policy"),
                refresh_reference=self.refresh_reference,
                after_step=self.mix_teacher if moves_teacher(self.cfg) else None,
                guard=NonFiniteGuard(self.cfg.trainer.faults, trainer),
                alarms=self.get_alarms(),
                report_alarm=self.report_alarm,
                callbacks=self.callbacks,
            ),
            total_steps=self.total_steps,
            tracker=tracker,
            clock=self.clock,
            shutdown=self.shutdown,
            checkpoints=self.saving,
        )

    async def _ready_to_sample(self, sync: WeightSync | NoEngines, *, newest: bool = False) -> None:
        """Handle requests to change the engines, and make the engines ready. They get the weights if they have none
        (for example because a checkpoint was saved meanwhile), and with `newest` if they have older ones.
        """
        if self.engine_changes is not None:
            await self.engine_changes.handle_requests()
        if sync.is_behind if newest else sync.weights_discarded:
            await self.time_sharing.for_transfer("policy")
            await sync.catch_up()
        await self.time_sharing.for_engines()

    def _with_engine_replacement(
        self, method: Callable[P, Awaitable[R]], sync: WeightSync | NoEngines
    ) -> Callable[P, Awaitable[R]]:
        """`method`, which samples; when its last engine has died and was restarted, it continues on the new one."""
        if not isinstance(sync, WeightSync):
            return method

        async def transfer() -> None:
            await self.time_sharing.for_transfer("policy")
            await sync.send_again()
            await self.time_sharing.for_engines()

        return ReplacementSync(self.client, transfer).around(method)

    async def _samples_written(self) -> None:
        """Wait until the samples of the last step are written, so that a slow disk costs time and no memory."""
        with self.clock.measure("write_samples"):
            await self.folder.samples.finished()

    async def refresh_reference(self) -> None:
        """Replace the reference, if there is one, with the current policy, into which an adapter is merged."""
        if self.reference is None:
            return
        async with self._stored_policy() as weights:
            await self.time_sharing.for_scoring("ref")
            await self.reference.load_state(weights, {})

    async def mix_teacher(self, step: int) -> None:
        """Mix the current policy, into which an adapter is merged, into the teacher that is its moving average."""
        settings = self.cfg.trainer.algorithm.distillation
        if settings.teacher_update_rate is None or step % settings.teacher_sync_steps:
            return
        path = str(self.cfg.trainer.teacher.model.path)
        with self.clock.measure("update_teacher_with_policy"):
            async with self._stored_policy() as weights:
                await self.time_sharing.for_scoring(self._device_name_of(path))
                await self.local_teachers[path].mix(weights, settings.teacher_update_rate)

    @asynccontextmanager
    async def _stored_policy(self) -> AsyncIterator[StoredTensors]:
        """The current weights of the policy, in files as long as the block lasts."""
        with TemporaryDirectory(prefix=".policy_", dir=self.folder.path) as scratch:  # all ranks see this folder
            storage = Disk(Path(scratch))
            await self.time_sharing.for_scoring("policy")
            files = await self.policy.export_weights(WeightFiles(storage=storage, folder="policy"))
            yield StoredTensors(storage, "policy", files)

    def _device_name_of(self, path: str) -> str:
        """The name of a local teacher among the models that take turns on the devices."""
        return TEACHER.name if path == self.cfg.trainer.teacher.model.path else f"{TEACHER.name} {path}"

    async def prepare(self) -> None:
        """Ask the served teachers for their limits, free the devices for the engines, which start when the loop is
        built, and open the endpoint.
        """
        await self._ask_teachers()
        await self.time_sharing.for_engines()
        self.open_endpoint()

    async def _ask_teachers(self) -> None:
        """Raises `UserError`, `ModelError` or `ProcessError` for a served teacher that does not answer, takes too few
        tokens, reports too few log-probabilities or has other tokens, and for a data source without a teacher.
        """
        served, distillation = self.served_teachers, self.cfg.trainer.algorithm.distillation
        named, settings = self.cfg.trainer.teacher.named_sources, self.cfg.trainer.teacher
        known = not (self.recorded or self.cfg.trainer.num_dummy_steps or self.cfg.data.streaming)
        if named and known:
            sources = {prompt.data_source for prompt in self.train_dataset.prompts}
            missing = sources - named
            if missing and not (settings.endpoint.url or settings.model.path or distillation.self_teacher):
                raise UserError(no_teacher_message({str(source) for source in missing}))
            if unused := named - sources:
                raise UserError(no_row_message(unused, {str(source) for source in sources}))
        top = (distillation.top_k or 0) if distillation.type == "loss" else 0
        policy = str(self.cfg.trainer.policy.model.path)
        await connect_teachers(
            served.values(),
            self.tokenizer,
            policy,
            longest=longest_sequence(self.cfg),
            top=top,
            address="trainer.teacher.endpoint",
            length="generator.sampling_params.max_generate_length",
        )

    def begin_recording(self) -> None:
        """Start the recording, if the run makes one. Raises `RunError` if it cannot be written."""
        if self.cfg.trainer.recording != "off":
            self.folder.recording().begin({"total_steps": self.total_steps, "made_with": made_with()})

    async def close(self) -> None:
        """Close the rollouts, the endpoint and the engines after training."""
        await self.rollouts.close()
        await self.close_endpoint()
        await close_teachers(self.served_teachers.values())
        if not self.recorded:
            end_otherwise = self.shutdown.requested and on_ray(self.cfg) and starts_engines(self.cfg)
            await self.client.close(engines_end_otherwise=end_otherwise)  # their processes are killed
            self.time_sharing.engines_closed()
        self.sample_sink.write_uncomputed()

    @property
    def products(self) -> tuple[Path, ...]:
        """The trained model, its adapter and the reward curve; nothing for made-up samples."""
        return () if self.cfg.trainer.num_dummy_steps else (*super().products, self.folder.curve)

    async def finish(self) -> None:
        """Write the trained model and draw the reward curve; for made-up samples, report that they fit."""
        if self.cfg.trainer.num_dummy_steps:
            notice(fit_report(self.cfg, self.folder.metrics.read()))
            return
        await super().finish()
        self.folder.draw_curve(redacted(self.cfg.trainer.folder("run_path")))

    def _record_samples(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        self.sample_sink.keep(step, groups)

    def _start(self, role: Model, worker: Callable[..., R], *arguments: object) -> Group[R]:
        """Start the workers of a role, one for each of its ranks."""
        ranks = self.ranks_of(role, grid_of(self.cfg, role).ranks, replicas_of(self.cfg, role))
        return self.processes.start(role, [partial(worker, self.cfg.trainer, *arguments, ranks=rank) for rank in ranks])
