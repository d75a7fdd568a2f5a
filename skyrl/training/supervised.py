"""Supervised training: one step, which `loop.py` repeats, and the evaluation on rows that are not trained on.

A step is one batch of rows and one optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SupervisedConfig
from skyrl.data.cursor import PromptCursor, StreamCursor
from skyrl.errors import ResumeError
from skyrl.learners.workers.learning_worker import Objective
from skyrl.learners.workers.objectives import pair_margins, pair_scores, preference_loss
from skyrl.training.describe import Metrics
from skyrl.training.scorer import Scorer
from skyrl.training.trainer import Learner, update

Row = TypeVar("Row")

MOST_PERPLEXITY = math.log(1e30)
"""Nats above which the perplexity is not reported, because the number would be meaningless."""

Completion = Callable[[TrainingBatch], Awaitable[TrainingBatch]]
"""Function that adds to a batch what other models compute, such as a reference."""


async def unchanged(batch: TrainingBatch) -> TrainingBatch:
    """The `Completion` that adds nothing."""
    return batch


class RowPosition(Generic[Row]):
    """The position of supervised training in its rows."""

    def __init__(self, cursor: PromptCursor[Row] | StreamCursor[Row], total_steps: int, run: SupervisedConfig) -> None:
        """`total_steps` is the length of the whole run, which the learning-rate schedule may depend on."""
        self._cursor, self._total_steps = cursor, total_steps
        self._optimizer, self._may_change = run.optimizer_config, run.resume_with_changes
        self._epoch_of_batch = cursor.epoch

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        return self._cursor.epoch

    def take(self) -> Sequence[Row]:
        """The next batch of rows."""
        self._epoch_of_batch = self._cursor.epoch
        return self._cursor.take()

    def metrics(self) -> Metrics:
        """The epoch of the last batch, counted from 0, and metrics of the sampler."""
        return {"trainer/epoch": float(self._epoch_of_batch), **self._cursor.metrics()}

    def state(self) -> dict[str, Any]:
        """State of the position, as a checkpoint stores it."""
        return {"total_steps": self._total_steps, **self.data()}

    def data(self) -> dict[str, Any]:
        """The part of `state` that says which rows come next."""
        return {"rows": self._cursor.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises `ResumeError` if the state belongs to other rows, or if the run now has another length, which would
        change the learning rate of steps already taken, unless changes are allowed.
        """
        before, optimizer = int(state.get("total_steps", self._total_steps)), self._optimizer
        ends = optimizer.scheduler not in ("constant", "constant_with_warmup") or optimizer.warmup_steps_proportion
        if before != self._total_steps and ends and not self._may_change:
            raise ResumeError(
                f"the run had {before} steps when the checkpoint was saved, and has {self._total_steps}: the learning "
                f"rate ({optimizer.scheduler}) of the steps taken was another one. Keep num_steps, num_epochs and "
                "max_training_samples, or set resume_with_changes = true to continue with the rates of the new length"
            )
        self._cursor.load_state(state["rows"])


@define(eq=False, slots=False)
class SupervisedTrainer(Generic[Row]):
    """Trains a model on rows, independent of the kind of rows and of the model's device."""

    token_metric: ClassVar[str] = "train/tokens"
    """Metric that counts the tokens of a step."""

    position: RowPosition[Row]
    collate: Callable[[Sequence[Row]], TrainingBatch]
    """Makes a batch from rows."""

    learner: Learner
    objective: Objective
    """Objective that the learner minimizes."""

    _complete: Completion = unchanged
    version: int = field(default=0, init=False)
    """Number of optimizer steps that the weights have been trained for."""

    async def begin(self) -> Metrics:
        """Does nothing: there are no engines to prepare."""
        return {}

    async def step(self) -> Metrics:
        """Train on one batch, with one optimizer step."""
        batch = await self._complete(self.collate(self.position.take()))
        learned = await update(self.learner, batch, self.objective)
        renamed = {name.removeprefix("policy_").removeprefix("critic_"): value for name, value in learned.items()}
        return {
            **{f"train/{name}": value for name, value in renamed.items()},
            "train/tokens": float(batch.lengths.sum()),
            "train/learned_tokens": float(batch.loss_mask.sum()),
        }


Sums = dict[str, tuple[float, float]]
"""Sums by name, each with the number of its terms: name -> (sum, count)."""

Measure = Callable[[Tensor, TrainingBatch], Sums]
"""Function from a batch's scores to sums."""


@frozen
class SupervisedEvaluation:
    """Evaluates a model on several sets of rows, separately and together."""

    _sets: Mapping[str, Sequence[Any]]
    _collate: Callable[[Sequence[Any]], TrainingBatch]
    _measure: Measure
    _batch_size: int = field(kw_only=True)
    """Rows of the evaluation sets in a batch."""

    _complete: Completion = field(default=unchanged, kw_only=True)

    async def run(self, model: Scorer) -> dict[str, float]:
        """Metrics `eval/<set>/loss`, ... of each set, and `eval/all/...` of all together."""
        metrics: dict[str, float] = {}
        total: Sums = {}
        for name, rows in self._sets.items():
            own: Sums = {}
            for start in range(0, len(rows), self._batch_size):
                batch = await self._complete(self._collate(rows[start : start + self._batch_size]))
                own = _added(own, self._measure(await model.score(batch), batch))
            total = _added(total, own)
            metrics |= _means(f"eval/{name}", own)
        return metrics | _means("eval/all", total)


def likelihood(logprobs: Tensor, batch: TrainingBatch) -> Sums:
    """Negative log-likelihood in nats and number of the learned tokens of a batch, both weighted per token. `logprobs`
    (B, L).
    """
    weights = batch.loss_mask if batch.token_weights is None else batch.token_weights
    nats = torch.where(batch.loss_mask, -logprobs, 0.0).double() * weights
    return {"loss": (nats.sum().item(), float(weights.double().sum()))}


def preferences(values: Tensor, batch: TrainingBatch) -> Sums:
    """The loss of the pairs of a batch, and the number of pairs in the right order. `values` (B, L)."""
    chosen, rejected = pair_scores(torch.where(batch.loss_mask, values, 0.0))
    pairs = float(len(chosen))
    return {
        "loss": (preference_loss(chosen, rejected, pair_margins(batch)).double().sum().item(), pairs),
        "accuracy": ((chosen > rejected).double().sum().item(), pairs),
        "margin": ((chosen - rejected).double().sum().item(), pairs),
    }


def _added(one: Sums, other: Sums) -> Sums:
    result: Sums = {}
    for name in one | other:
        (nats, count), (more, others) = one.get(name, (0.0, 0.0)), other.get(name, (0.0, 0.0))
        result[name] = (nats + more, count + others)
    return result


def _means(prefix: str, sums: Sums) -> dict[str, float]:
    means = {f"{prefix}/{name}": total / count for name, (total, count) in sums.items() if count}
    if "accuracy" not in sums and f"{prefix}/loss" in means:
        means[f"{prefix}/perplexity"] = math.exp(min(means[f"{prefix}/loss"], MOST_PERPLEXITY))
    return means
