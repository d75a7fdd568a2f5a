"""The training algorithm. `PPOTrainer.step` is the algorithm as printed in the paper; `loop.py` decides what happens
around it and when. Timing, recording and turns on shared devices are layers around the trainer's collaborators
(`middleware.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from attrs import define, field
from torch import Tensor

from skyrl.algorithms.estimators import AdvantageEstimator
from skyrl.algorithms.losses import importance_ratio
from skyrl.algorithms.off_policy import interpolation_weight
from skyrl.batch import TEACHER_PROMPT, TrainingBatch
from skyrl.config import TrainerConfig
from skyrl.config.derive.sizes import scores_old_logprobs
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.learning_worker import Objective
from skyrl.rollout.batches import BatchSource, Rollouts
from skyrl.training.advantage import RewardShaping
from skyrl.training.collate import collate, row_sources, versions_behind
from skyrl.training.describe import Metrics, average, describe, describe_advantages, prefixed
from skyrl.training.objective import old_logprobs
from skyrl.training.online_dpo import RankedPairs
from skyrl.training.scorer import Scorer
from skyrl.training.teacher import Teacher, describe_teacher, hinted_share
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import required


class Learner(Scorer, Protocol):
    """A model that also learns. Gradients add up over calls of `forward_backward` until `optimizer_step`."""

    async def forward_backward(self, batch: TrainingBatch, objective: Objective, /) -> Metrics:
        """Add the gradient of the objective over the batch to those that the next `optimizer_step` uses."""

    async def optimizer_step(self, settings: StepSettings, /) -> Metrics:
        """One optimizer step. Gradients are zero afterwards."""


AS_CONFIGURED = StepSettings()
"""The settings of the learner's own configuration and schedule."""


async def update(learner: Learner, batch: TrainingBatch, objective: Objective) -> Metrics:
    """One optimizer step over a mini-batch, with the metrics of its pass and of the step."""
    metrics = await learner.forward_backward(batch, objective)
    return metrics | await learner.optimizer_step(AS_CONFIGURED)


class Publisher(Protocol):
    """Sends the learner's weights to the engines."""

    async def publish(self, version: int, /) -> Metrics:
        """Note the learner's weights as `version`, and send them if a transfer is due: the engines then sample from
        them when this returns. Metrics of the difference between engines and learner.
        """


class RolloutPosition:
    """The state of rollouts and of reward shaping, and the amount sampled since the beginning of the run."""

    def __init__(self, rollouts: Rollouts, shaping: RewardShaping) -> None:
        self._rollouts, self._shaping = rollouts, shaping
        self.samples_seen = self.tokens_seen = 0
        """Number of answers sampled for training, and of their tokens."""

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        return self._rollouts.epoch

    def count(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Add a batch that was sampled for training."""
        answers = [trajectory for group in groups for trajectory in group.trajectories]
        self.samples_seen += len(answers)
        self.tokens_seen += sum(answer.length for answer in answers)

    def metrics(self) -> Metrics:
        """Epochs, samples and tokens, under the names that they are logged with."""
        return {
            "trainer/epoch": self.epoch,
            "trainer/samples_seen": self.samples_seen,
            "trainer/tokens_seen": self.tokens_seen,
        }

    def state(self) -> dict[str, Any]:
        """The position, as a checkpoint stores it."""
        return {
            "samples_seen": self.samples_seen,
            "tokens_seen": self.tokens_seen,
            **self.data(),
            "rewards": self._shaping.state(),
        }

    def data(self) -> dict[str, Any]:
        """The part of `state` that says which prompts come next."""
        return {"rollouts": self._rollouts.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises `ResumeError` if the state belongs to other prompts."""
        self.samples_seen, self.tokens_seen = int(state["samples_seen"]), int(state["tokens_seen"])
        self._rollouts.load_state(state["rollouts"])
        self.take_back_shaping(state)

    def take_back_shaping(self, state: Mapping[str, Any]) -> None:
        """Restore reward shaping to its state in `state`; the position in the data stays."""
        self._shaping.load_state(state["rewards"])


@define(kw_only=True, eq=False, slots=False)
class PPOTrainer:
    """Policy-gradient training with groups of samples: GRPO and variants.

    It holds its collaborators and its configuration, and knows neither how batches are generated nor where models live.
    """

    token_metric: ClassVar[str] = "generate/num_tokens"
    """Metric that counts the tokens of a step."""

    _config: TrainerConfig = field(alias="trainer_cfg")
    rollouts: BatchSource
    policy: Learner
    reference: Scorer | None
    critic: Learner | None
    objective: Objective
    """Objective that the policy minimizes."""

    critic_objective: Objective
    weights: Publisher
    shape_rewards: Callable[[TrainingBatch], tuple[Tensor, Metrics]]
    estimate_advantages: AdvantageEstimator
    critic_targets: Callable[[TrainingBatch], Tensor]
    position: RolloutPosition
    """State of `rollouts` and `shape_rewards` that a checkpoint stores."""

    teacher: Teacher | None = None
    """Adds to a batch what the policy is distilled from."""

    pairs: RankedPairs | None = None
    """If given, the policy learns from pairs of answers, and no advantage is estimated."""

    version: int = field(default=0, init=False)
    """Number of training steps, skipped ones included; the training loop counts them."""

    def __attrs_post_init__(self) -> None:
        config = self._config
        self._mini_batch = required(
            config.policy_mini_batch_size_in_samples, "trainer.policy_mini_batch_size_in_samples"
        )
        self._critic_mini_batch = required(
            config.critic_mini_batch_size_in_samples, "trainer.critic_mini_batch_size_in_samples"
        )

    async def begin(self) -> Metrics:
        """Send the engines the weights that training continues from."""
        return await self.weights.publish(self.version)

    async def step(self) -> Metrics:
        """One batch of prompts, from sampling to new weights in the engines (GRPO, arXiv:2402.03300, algorithm 1).

        Nothing is learned before `improve`: a step abandoned before that point loses only its own time.
        """
        # x ~ data, y_1..y_n ~ pi_old (asynchronously: up to max_staleness_steps before it), r_i = R(x, y_i)
        groups = await self.rollouts.next_batch(self.version)
        batch = collate(groups, self.version, masks_zero_variance=self._config.algorithm.zero_variance_filter)
        if self._config.algorithm.old_logprobs != "learner":
            batch = self._use_engine_logprobs(batch, groups)
        elif self._needs_old_logprobs(batch):  # else pi_old is the policy itself, exactly
            batch = batch.with_fields(old_logprobs=await self.policy.score(batch))  # log pi_old
        if self.reference and not self.pairs:
            batch = batch.with_fields(ref_logprobs=await self.reference.score(batch))  # log pi_ref
        if self.critic:
            batch = batch.with_fields(values=await self.critic.score(batch))  # V of the state before each token
        hint_metrics: Metrics = {"loss/hinted": hinted_share(batch)} if TEACHER_PROMPT in batch.extras else {}
        if self.teacher:
            batch = await self.teacher(batch, row_sources(groups))  # log nu, or what it is computed from
        rewards, shaping_metrics = self.shape_rewards(batch)  # r_t, less beta KL(pi_old || pi_ref) if configured
        batch = batch.with_fields(rewards=rewards)
        if self.reference and self.pairs:  # log pi_ref of the answers that the rewards put into pairs
            batch = batch.with_fields(ref_logprobs=await self.pairs.score_paired(self.reference, batch))
        batch = batch.with_fields(advantages=self.estimate_advantages(batch))
        metrics = await self.improve(batch)  # epochs x mini-batches of updates of critic and policy
        metrics |= await self.weights.publish(self.version + 1)  # pi_old <- pi_theta
        teacher_metrics = hint_metrics | describe_teacher(batch) if self.teacher else {}
        pair_metrics = self.pairs.describe(batch) if self.pairs else {}
        learned_from = describe_advantages(batch) | teacher_metrics | pair_metrics | shaping_metrics
        return describe(groups) | self.rollouts.metrics() | learned_from | metrics

    async def improve(self, batch: TrainingBatch) -> Metrics:
        """`update_epochs_per_batch` passes over the batch, with one optimizer step per mini-batch: all passes of the
        critic, then those of the policy. Metrics are averages.
        """
        metrics: Metrics = {}
        if self.critic:
            batch = batch.with_fields(returns=self.critic_targets(batch))
            learned = await self._learn(self.critic, self.critic_objective, batch, self._critic_mini_batch)
            metrics |= prefixed("critic", learned)
        bound = self._config.algorithm.max_importance_ratio
        learned = await self._learn(
            self.policy, self.objective, batch, self._mini_batch, max_ratio=bound, pairs=self.pairs
        )
        metrics |= prefixed("policy", learned)
        return metrics | {"policy/response_length": batch.loss_mask.sum().item() / batch.answers}

    async def _learn(
        self,
        learner: Learner,
        objective: Objective,
        batch: TrainingBatch,
        mini_batch_answers: int,
        *,
        max_ratio: float | None = None,
        pairs: RankedPairs | None = None,
    ) -> Metrics:
        """One optimizer step per mini-batch; for `max_ratio` see `AlgorithmConfig.max_importance_ratio`. With `pairs`,
        each mini-batch is scored before its step, and one without a pair has none.
        """
        mini_batches = list(batch.split_by_answers(mini_batch_answers))
        learnable = [mini_batch for mini_batch in mini_batches if mini_batch.loss_mask.any()]
        if pairs:
            learnable = [mini_batch for mini_batch in learnable if len(pairs.pairs(mini_batch))]
        updates: list[Metrics] = []
        schedule = [mini_batch for _ in range(self._config.update_epochs_per_batch) for mini_batch in learnable]
        for mini_batch in schedule:
            if pairs:
                with_advantages, measured = await pairs.with_pair_advantages(learner, mini_batch)
                updates.append(await update(learner, with_advantages, objective) | measured)
            elif max_ratio is None or not await _mean_ratio(learner, mini_batch) > max_ratio:
                updates.append(await update(learner, mini_batch, objective))
        counts: Metrics = {"mini_batches_without_a_token": len(mini_batches) - len(learnable)}
        if max_ratio is not None:
            counts["mini_batches_moved_too_far"] = len(schedule) - len(updates)
        return average(updates) | counts

    def _use_engine_logprobs(self, batch: TrainingBatch, groups: Sequence[TrajectoryGroup]) -> TrainingBatch:
        """Fill in log pi_old from the engine's log-probabilities and, if configured, the share of the current policy in
        it.
        """
        batch = batch.with_fields(old_logprobs=batch.rollout_logprobs)
        if self._config.algorithm.old_logprobs == "engine":
            return batch
        behind = versions_behind(groups, self.version, batch.input_ids.shape[1])
        return batch.with_fields(interpolation=interpolation_weight(behind))

    def _needs_old_logprobs(self, batch: TrainingBatch) -> bool:
        mini_batches = -(-batch.answers // self._mini_batch)
        return scores_old_logprobs(self._config.algorithm, self._config.update_epochs_per_batch * mini_batches)


async def _mean_ratio(learner: Learner, batch: TrainingBatch) -> float:
    """Mean of pi / pi_old over the trained tokens; 1 where pi_old is the policy itself."""
    if batch.old_logprobs is None:
        return 1.0
    logprobs = await learner.score(batch)
    ratio = importance_ratio(logprobs, old_logprobs(logprobs, batch))
    return ratio[batch.loss_mask].mean().item()
