"""The loop. `step` is the algorithm; everything around it is when to evaluate, save, export and log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from skyrl.algorithms.estimators import AdvantageEstimator
from skyrl.batch import TrainingBatch
from skyrl.config import TrainerConfig
from skyrl.rollout.batches import Rollouts
from skyrl.tracking.timing import Clock
from skyrl.tracking.tracker import Tracker
from skyrl.training.collate import collate
from skyrl.training.describe import Metrics, average, describe, describe_advantages, prefixed
from skyrl.training.evaluation import Evaluation
from skyrl.training.shaping import RewardShaping
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
        save: Callable[[int], Awaitable[None]],
        export: Callable[[int], Awaitable[None]],
        on_samples: Callable[[int, Sequence[TrajectoryGroup]], None],
    ) -> None:
        """`save` and `export` write a checkpoint and a model of the step they are given; `on_samples` sees every
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
        self.version = 0
        self.samples_seen = self.tokens_seen = 0
        """Answers that were sampled for training since the beginning of the run, and their tokens."""
        self._save, self._export, self._on_samples = save, export, on_samples
        self._mini_batch = required(
            trainer_cfg.policy_mini_batch_size_in_samples, "trainer.policy_mini_batch_size_in_samples"
        )
        self._critic_mini_batch = required(
            trainer_cfg.critic_mini_batch_size_in_samples, "trainer.critic_mini_batch_size_in_samples"
        )

    async def step(self) -> Metrics:
        """One batch of prompts, from sampling to new weights in the engines (GRPO, arXiv:2402.03300, algorithm 1)."""
        groups = await self.rollouts.next_batch(self.version)  # x ~ data, y_1..y_n ~ pi_old, r_i = R(x, y_i)
        self._count(groups)
        self._on_samples(self.version + 1, groups)
        batch = collate(groups)
        if self._needs_old_logprobs(batch):  # else pi_old is the policy itself, exactly
            batch = batch.given(old_logprobs=await self.policy.score(batch))  # log pi_old
        if self.reference:
            batch = batch.given(ref_logprobs=await self.reference.score(batch))  # log pi_ref
        if self.critic:
            batch = batch.given(values=await self.critic.score(batch))  # V of the states that tokens were drawn in
        rewards, shaped = self.shape(batch)  # r_t, less beta KL(pi_old || pi_ref) where that is wanted
        batch = batch.given(rewards=rewards)
        batch = batch.given(advantages=self.estimate(batch))
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
        return metrics | {"policy/response_length": batch.loss_mask.sum(1).float().mean().item()}

    async def _learn(self, learner: Learner, batch: TrainingBatch, rows: int) -> Metrics:
        mini_batches = list(batch.split(rows))
        learnable = [mini_batch for mini_batch in mini_batches if mini_batch.loss_mask.any()]
        updates = [
            await learner.update(mini_batch)
            for _ in range(self._config.update_epochs_per_batch)
            for mini_batch in learnable
        ]
        return average(updates) | {"mini_batches_without_a_token": len(mini_batches) - len(learnable)}

    async def train(self) -> None:
        """From the current version to the last step."""
        metrics = await self.weights.publish(self.version)
        if self.version == 0:
            metrics |= await self._evaluate() if self._config.eval_before_train else {}
            self.tracker.log(0, metrics | self.clock.take())
        self.clock.take()
        while self.version < self.total_steps:
            with self.clock.measure("step"):
                metrics = await self.step()
            self.version += 1
            metrics |= {"trainer/epoch": self.rollouts.epoch, "trainer/global_step": self.version}
            metrics |= {"trainer/samples_seen": self.samples_seen, "trainer/tokens_seen": self.tokens_seen}
            if self._is_due(self._config.eval_interval):
                metrics |= await self._evaluate()
            self.tracker.log(
                self.version, metrics | self._timings(metrics)
            )  # before saving: a checkpoint has its record
            if self._is_due(self._config.ckpt_interval):
                with self.clock.measure("save_checkpoints"):
                    await self._save(self.version)
            if self._is_due(self._config.hf_save_interval):
                await self._export(self.version)

    async def _evaluate(self) -> Metrics:
        if self.evaluation is None:
            return {}
        with self.clock.measure("eval"):
            return await self.evaluation.run(self.version)

    def _is_due(self, interval: int) -> bool:
        """Every `interval` steps and at the last one; never where the interval is not positive."""
        return interval > 0 and (self.version % interval == 0 or self.version == self.total_steps)

    def _needs_old_logprobs(self, batch: TrainingBatch) -> bool:
        several_updates = self._config.update_epochs_per_batch > 1 or len(batch) > self._mini_batch
        return several_updates or self._config.algorithm.use_kl_in_reward

    def _timings(self, metrics: Metrics) -> Metrics:
        timings = self.clock.take()
        self.clock.total += timings["timing/step"]
        timings |= {"timing/all_steps": self.clock.total}
        return timings | {"trainer/tokens_per_second": metrics["generate/num_tokens"] / timings["timing/step"]}

    def _count(self, groups: Sequence[TrajectoryGroup]) -> None:
        answers = [trajectory for group in groups for trajectory in group.trajectories]
        self.samples_seen += len(answers)
        self.tokens_seen += sum(len(answer.response_ids) for answer in answers)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of the loop."""
        return {
            "version": self.version,
            "samples_seen": self.samples_seen,
            "tokens_seen": self.tokens_seen,
            "seconds": self.clock.total,
            "rollouts": self.rollouts.state(),
            "rewards": self.shape.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on after the step that `state` was taken at."""
        self.version = int(state["version"])
        self.samples_seen, self.tokens_seen = int(state["samples_seen"]), int(state["tokens_seen"])
        self.clock.total = float(state["seconds"])
        self.rollouts.load_state(state["rollouts"])
        self.shape.load_state(state["rewards"])
