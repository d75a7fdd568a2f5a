"""What the trainer sees of rollouts: `next_batch`. Where prompts come from and how a batch is filled stays behind
it.
"""

from __future__ import annotations

from typing import Any, Protocol

from skyrl.config import GeneratorConfig
from skyrl.data.cursor import PromptCursor
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import TrajectoryGroup


class Rollouts(Protocol):
    """A source of training batches; the trainer cannot tell a synchronous one from an asynchronous one."""

    async def next_batch(self, version: int) -> tuple[TrajectoryGroup, ...]:
        """One full batch of groups, sampled by weights that are `version` or, asynchronously, not much older."""

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of the position in the data."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""


class SynchronousRollouts:
    """The next batch of prompts, sampled when it is asked for."""

    def __init__(self, cursor: PromptCursor, generator: SkyRLGymGenerator, config: GeneratorConfig) -> None:
        self._cursor = cursor
        self._generator = generator
        self._config = config

    async def next_batch(self, version: int) -> tuple[TrajectoryGroup, ...]:
        return await self._generator.generate(
            self._cursor.take(),
            sampling=self._config.sampling_params,
            samples_per_prompt=self._config.n_samples_per_prompt,
            weight_version=version,
        )

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        return self._cursor.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._cursor.load_state(state)
