"""One step of supervised training: one batch of rows and one optimizer step. `loop.py` repeats it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from skyrl.batch import TrainingBatch
from skyrl.config import SupervisedConfig
from skyrl.data.cursor import PromptCursor, StreamCursor
from skyrl.errors import ResumeError
from skyrl.learners.workers.learning_worker import Objective
from skyrl.training.describe import Metrics
from skyrl.training.supervised_evaluation import Completion, unchanged
from skyrl.training.trainer import Learner, update

Row = TypeVar("Row")


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
        self._refuse_another_length(int(state.get("total_steps", self._total_steps)))
        self._cursor.load_state(state["rows"])

    def _refuse_another_length(self, before: int) -> None:
        """Raises `ResumeError` if the schedule depends on the length of the run and that length has changed."""
        optimizer = self._optimizer
        ends = optimizer.scheduler not in ("constant", "constant_with_warmup") or optimizer.warmup_steps_proportion
        if before != self._total_steps and ends and not self._may_change:
            raise ResumeError(
                f"the run had {before} steps when the checkpoint was saved, and has {self._total_steps}: the learning "
                f"rate ({optimizer.scheduler}) of the steps taken was another one. Keep num_steps, num_epochs and "
                "max_training_samples, or set resume_with_changes = true to continue with the rates of the new length"
            )


class SupervisedTrainer(Generic[Row]):
    """Trains a model on rows, independent of the kind of rows and of the model's device."""

    token_metric = "train/tokens"
    """Metric that counts the tokens of a step."""

    def __init__(
        self,
        position: RowPosition[Row],
        collate: Callable[[Sequence[Row]], TrainingBatch],
        learner: Learner,
        objective: Objective,
        complete: Completion = unchanged,
    ) -> None:
        """`collate` makes a batch from rows, and `complete` adds to it what other models compute; `objective` is what
        the learner minimizes.
        """
        self.position, self.collate, self.learner, self.objective = position, collate, learner, objective
        self._complete = complete
        self.version = 0
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
