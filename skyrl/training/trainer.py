"""The loop. `step` is the algorithm; everything around it is when to evaluate, save, export and log."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from skyrl.algorithms.estimators import AdvantageEstimator
from skyrl.batch import TrainingBatch
from skyrl.config import TrainerConfig
from skyrl.config.sizes import scores_old_logprobs
from skyrl.errors import NonFiniteError, Stopped
from skyrl.processes.stopping import Stopping
from skyrl.rollout.batches import Rollouts
from skyrl.tracking.timing import Clock
from skyrl.tracking.tracker import Tracker
from skyrl.training.collate import collate
from skyrl.training.describe import Metrics, average, describe, describe_advantages, prefixed
from skyrl.training.evaluation import Evaluation
from skyrl.training.guards import Guard, refuse_non_finite
from skyrl.training.shaping import RewardShaping
from skyrl.training.triggers import Trigger
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import required


class Scorer(Protocol):
    """A model that gives log-probabilities."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) log-probabilities of the sampled tokens, in nats."""


class Learner(Scorer, Protocol):
    """A model that also learns."""

    async def update(self, batch: TrainingBatch) -> Metrics:
        """One optimizer step over the mini-batch."""


class Publisher(Protocol):
    """The road from the learner to the engines."""

    async def publish(self, version: int) -> Metrics:
        """The engines sample from the learner's weights, as `version`, when this returns; how far apart both are."""


class PPOTrainer:
    """Policy-gradient training with groups of samples: GRPO and its kin.

    It holds its collaborators and its configuration, and knows neither how batches are generated nor where models live.
    """

    def __init__(
        self,
        trainer_cfg: TrainerConfig,
        *,
        rollouts: Rollouts,
        policy: Learner,
        reference: Scorer | None,
        critic: Learner | None,
        weights: Publisher,
        shape: RewardShaping,
        estimate: AdvantageEstimator,
        targets: Callable[[TrainingBatch], Tensor],
        evaluation: Evaluation | None,
        tracker: Tracker,
        clock: Clock,
        total_steps: int,
        stopping: Stopping,
        save: Callable[[int], Awaitable[None]],
        restore: Callable[[], Awaitable[Mapping[str, Any] | None]],
        export: Callable[[int], Awaitable[None]],
        on_samples: Callable[[int, Sequence[TrajectoryGroup]], None],
    ) -> None:
        """`save` and `export` write a checkpoint and a model of the step they are given; `restore` takes the models
        back to the last checkpoint and gives what `state` was then, or None without one; `on_samples` sees every
        rollout.

        `total_steps` counts batches. `version` is the number of steps that the policy's weights have behind them.
        """
        self._config = trainer_cfg
        self.rollouts = rollouts
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.weights = weights
        self.shape = shape
        self.estimate = estimate
        self.targets = targets
        self.evaluation = evaluation
        self.tracker = tracker
        self.clock = clock
        self.total_steps = total_steps
        self.stopping = stopping
        self.guard = Guard(trainer_cfg.faults)
        self.version = 0
        self.samples_seen = self.tokens_seen = 0
        """Answers that were sampled for training since the beginning of the run, and their tokens."""
        self._saved = 0
        self._before: dict[str, Any] | None = None  # where the step that is going on began
        self._unrecorded: Metrics | None = None  # of a step whose evaluation is not over
        self._longest_step = 0.0
        self._triggers = {
            "evaluate": Trigger(trainer_cfg.eval_interval),
            "save": Trigger(trainer_cfg.ckpt_interval),
            "export": Trigger(trainer_cfg.hf_save_interval),
        }
        self._save, self._restore, self._export, self._on_samples = save, restore, export, on_samples
        self._mini_batch = required(
            trainer_cfg.policy_mini_batch_size_in_samples, "trainer.policy_mini_batch_size_in_samples"
        )
        self._critic_mini_batch = required(
            trainer_cfg.critic_mini_batch_size_in_samples, "trainer.critic_mini_batch_size_in_samples"
        )

    async def step(self) -> Metrics:
        """One batch of prompts, from sampling to new weights in the engines (GRPO, arXiv:2402.03300, algorithm 1)."""
        with self.stopping.interruptible():  # nothing is learnt in here: given up, it costs only its own time
            groups = await self.rollouts.next_batch(self.version)  # x ~ data, y_1..y_n ~ pi_old, r_i = R(x, y_i)
            batch = collate(groups)
            refuse_non_finite(batch, groups)
            self._count(groups)
            self._on_samples(self.version + 1, groups)
            if self._needs_old_logprobs(batch):  # else pi_old is the policy itself, exactly
                batch = batch.given(old_logprobs=await self.policy.score(batch))  # log pi_old
            if self.reference:
                batch = batch.given(ref_logprobs=await self.reference.score(batch))  # log pi_ref
            if self.critic:
                batch = batch.given(values=await self.critic.score(batch))  # V of the states tokens were drawn in
            rewards, shaped = self.shape(batch)  # r_t, less beta KL(pi_old || pi_ref) where that is wanted
            batch = batch.given(rewards=rewards)
            batch = batch.given(advantages=self.estimate(batch))
            refuse_non_finite(batch, groups)
        metrics = await self.improve(batch)  # epochs x mini-batches of updates of critic and policy
        metrics |= await self.weights.publish(self.version + 1)  # pi_old <- pi_theta
        return describe(groups) | self.rollouts.metrics() | describe_advantages(batch) | shaped | metrics

    async def improve(self, batch: TrainingBatch) -> Metrics:
        """`update_epochs_per_batch` passes over the batch, first of the critic and then of the policy, one optimizer
        step for each mini-batch; metrics are averages.
        """
        metrics: Metrics = {}
        if self.critic:
            batch = batch.given(returns=self.targets(batch))
            metrics |= prefixed("critic", await self._learn(self.critic, batch, self._critic_mini_batch))
        metrics |= prefixed("policy", await self._learn(self.policy, batch, self._mini_batch))
        return metrics | {"policy/response_length": batch.loss_mask.sum().item() / batch.answers}

    async def _learn(self, learner: Learner, batch: TrainingBatch, answers: int) -> Metrics:
        mini_batches = list(batch.split_by_answers(answers))
        learnable = [mini_batch for mini_batch in mini_batches if mini_batch.loss_mask.any()]
        updates = [
            await learner.update(mini_batch)
            for _ in range(self._config.update_epochs_per_batch)
            for mini_batch in learnable
        ]
        return average(updates) | {"mini_batches_without_a_token": len(mini_batches) - len(learnable)}

    async def train(self) -> None:
        """From the current version to the last step. Raises `Stopped` when told to stop, with what was learnt saved."""
        try:
            await self._begin()
            while self.version < self.total_steps:
                metrics = await self._take_step()
                if metrics is not None:
                    await self._conclude(metrics | self._timings(metrics), evaluate=self._is_due("evaluate"))
        except Stopped as stop:
            raise await self._saved_before_the_end(stop) from None

    async def _begin(self) -> None:
        """Engines with the current weights; what was left undone by an earlier session."""
        with self.stopping.interruptible():
            metrics = await self.weights.publish(self.version)
            if self.version == 0:
                metrics |= await self._evaluate() if self._config.eval_before_train else {}
                self.tracker.log(0, metrics | self.clock.take())
            self.clock.take()
        if self._unrecorded is not None:
            await self._conclude(dict(self._unrecorded), evaluate=True)

    async def _take_step(self) -> Metrics | None:
        """The metrics of one step; None where the run went back instead."""
        if self.stopping.seconds_left < self._longest_step:
            self.stopping.request("Stopped before the deadline of trainer.faults.stop_before")
        self._before = self._position()
        began = time.monotonic()
        try:
            with self.clock.measure("step"):
                metrics = await self.step()
            self.guard.went_well()
        except NonFiniteError as error:
            match self.guard.decide(error):
                case "skip":
                    self.shape.load_state(self._before["rewards"])
                    metrics = await self.weights.publish(self.version + 1) | {"trainer/skipped_steps": 1}
                case "roll_back":
                    await self._go_back(error)
                    return None
        self._longest_step = max(self._longest_step, time.monotonic() - began)
        self.version, self._before = self.version + 1, None
        return metrics | {
            "trainer/epoch": self.rollouts.epoch,
            "trainer/global_step": self.version,
            "trainer/samples_seen": self.samples_seen,
            "trainer/tokens_seen": self.tokens_seen,
        }

    async def _conclude(self, metrics: Metrics, *, evaluate: bool) -> None:
        """What follows a step: evaluation, its record, export, checkpoint; a checkpoint has its record and export."""
        if evaluate:
            self._unrecorded = metrics
            with self.stopping.interruptible():
                metrics = metrics | await self._evaluate()
        self._unrecorded = None
        self.tracker.log(self.version, metrics | self.clock.take())
        save = self._is_due("save")
        if self._is_due("export"):
            await self._export(self.version)
        if save and self.version > self._saved:
            await self._keep()

    async def _keep(self) -> None:
        with self.clock.measure("save_checkpoints"):
            await self._save(self.version)
        self._saved = self.version

    async def _saved_before_the_end(self, stop: Stopped) -> Stopped:
        """Keeps the last step, of which nothing was lost, where checkpoints are wanted."""
        if self.version > self._saved and self._triggers["save"].ever:
            await self._keep()
        if self.version == self._saved > 0:
            return self.stopping.stopped(f"Step {self.version} is saved: the same command goes on after it.")
        return stop

    async def _go_back(self, error: NonFiniteError) -> None:
        """To the last checkpoint, with the prompts after this batch."""
        state = await self._restore()
        if state is None:
            raise NonFiniteError(f"{error} (there is no checkpoint to go back to)") from error
        self.load_state({**state, "rollouts": self.rollouts.state()})
        self.guard.say(f"going back to step {self.version}, and on with other prompts: {error}")
        await self.weights.publish(self.version)

    async def _evaluate(self) -> Metrics:
        if self.evaluation is None:
            return {}
        with self.clock.measure("eval"):
            return await self.evaluation.run(self.version)

    def _is_due(self, what: str) -> bool:
        return self._triggers[what].due(self.version, self.rollouts.epoch, last=self.version == self.total_steps)

    def _needs_old_logprobs(self, batch: TrainingBatch) -> bool:
        mini_batches = -(-batch.answers // self._mini_batch)
        return scores_old_logprobs(self._config.algorithm, self._config.update_epochs_per_batch * mini_batches)

    def _timings(self, metrics: Metrics) -> Metrics:
        timings = self.clock.take()
        self.clock.total += timings["timing/step"]
        timings |= {"timing/all_steps": self.clock.total}
        return timings | {"trainer/tokens_per_second": metrics.get("generate/num_tokens", 0) / timings["timing/step"]}

    def _count(self, groups: Sequence[TrajectoryGroup]) -> None:
        answers = [trajectory for group in groups for trajectory in group.trajectories]
        self.samples_seen += len(answers)
        self.tokens_seen += sum(len(answer.response_ids) for answer in answers)

    def _position(self) -> dict[str, Any]:
        return {
            "samples_seen": self.samples_seen,
            "tokens_seen": self.tokens_seen,
            "rollouts": self.rollouts.state(),
            "rewards": self.shape.state(),
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of the loop: as it was after the last whole step."""
        return {
            "version": self.version,
            "seconds": self.clock.total,
            **(self._before or self._position()),
            "triggers": {what: trigger.state() for what, trigger in self._triggers.items()},
            "unrecorded": self._unrecorded,  # metrics of the last step, where its evaluation is still to come
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the step that `state` was taken at."""
        self.version = self._saved = int(state["version"])
        self.samples_seen, self.tokens_seen = int(state["samples_seen"]), int(state["tokens_seen"])
        self.clock.total = float(state["seconds"])
        self.rollouts.load_state(state["rollouts"])
        self.shape.load_state(state["rewards"])
        for what, trigger in self._triggers.items():
            trigger.load_state(state.get("triggers", {}).get(what, {}))
        self._unrecorded = state.get("unrecorded")
        self._before = None
