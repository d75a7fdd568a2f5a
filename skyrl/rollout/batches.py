"""The trainer's view of rollouts: `next_batch`. It hides the source of prompts and the filling of batches."""

from __future__ import annotations

from typing import Any, Protocol

from skyrl.config import AlgorithmConfig, GeneratorConfig
from skyrl.data.cursor import PromptCursor
from skyrl.data.stream_cursor import StreamCursor
from skyrl.errors import ResumeError
from skyrl.rollout.batch_filter import Batch, BatchFilter
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import TrajectoryGroup


class BatchSource(Protocol):
    """A source of training batches; the trainer cannot tell a synchronous one from an asynchronous one."""

    async def next_batch(self, version: int, /) -> tuple[TrajectoryGroup, ...]:
        """One full batch of groups, sampled by weights that are `version` or, asynchronously, not much older."""

    def metrics(self) -> dict[str, float]:
        """Numbers of groups that were dropped, replaced or left out to make the last batch."""


class Rollouts(BatchSource, Protocol):
    """A source of training batches, with what a run needs around the trainer."""

    def set_weights_version(self, version: int) -> None:
        """Notification that the engines now hold the weights of this version."""

    @property
    def epoch(self) -> int:
        """Number of complete passes over the data."""

    def state(self) -> dict[str, Any]:
        """Position in the data, as a checkpoint stores it."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""

    async def close(self) -> None:
        """Cancel the samples that are still being drawn."""


class SynchronousRollouts:
    """Samples each batch when the trainer asks for it, and more batches if groups have to be replaced."""

    def __init__(
        self,
        cursor: PromptCursor | StreamCursor,
        generator: SkyRLGymGenerator,
        config: GeneratorConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
    ) -> None:
        """`seed` is the run's; random choices follow from it and the version."""
        self._cursor = cursor
        self._generator = generator
        self._config = config
        self._batch_filter = BatchFilter(self._sample, generator, config, algorithm, seed=seed)

    async def next_batch(self, version: int) -> Batch:
        """Sample one full batch. Raises `RunError` if dynamic sampling does not fill it within its limit."""
        return await self._batch_filter.batch(version)

    async def _sample(self, version: int, batch_attempt: int) -> Batch:
        first = self._cursor.drawn
        groups = await self._generator.generate(
            self._cursor.take(),
            sampling=self._config.sampling_params,
            samples_per_prompt=self._config.n_samples_per_prompt,
            weight_version=version,
            attempt=batch_attempt,
        )
        for number, group in enumerate(groups, first):
            self._cursor.observe(number, group.judged_rewards)
        return groups

    def metrics(self) -> dict[str, float]:
        return self._batch_filter.metrics | self._cursor.metrics()

    def set_weights_version(self, version: int) -> None:
        """Does nothing: no group is sampled ahead."""

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        return self._cursor.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises `ResumeError` for a state with groups that were sampled ahead, which would be lost."""
        if "cursor" in state:
            raise ResumeError(
                "the checkpoint holds groups and prompts that were sampled ahead of training, which a synchronous "
                "run would lose: keep trainer.fully_async.enabled = true, and set "
                "trainer.fully_async.max_staleness_steps = 0 to train synchronously"
            )
        self._cursor.load_state(state)

    async def close(self) -> None:
        """Does nothing: nothing runs between batches."""
