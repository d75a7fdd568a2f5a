"""Position of a reinforcement-learning run in its data, and its stored form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.rollout.batches import Rollouts
from skyrl.training.describe import Metrics
from skyrl.training.shaping import RewardShaping
from skyrl.trajectory import TrajectoryGroup


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
