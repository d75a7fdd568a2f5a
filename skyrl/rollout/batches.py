"""The trainer's view of rollouts: `next_batch`. It hides the source of prompts and the filling of batches.

`SynchronousRollouts` are sampled when the trainer asks; `FullLengthRollouts` are made up, and take as much memory as a
batch can.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import attrs
import numpy as np

from skyrl.config import AlgorithmConfig, GeneratorConfig
from skyrl.data.cursor import PromptCursor, StreamCursor
from skyrl.errors import ResumeError
from skyrl.rollout.batch_filter import Batch, BatchFilter
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


class BatchSource(Protocol):
    """A source of training batches; the trainer cannot tell a synchronous one from an asynchronous one."""

    async def next_batch(self, version: int, /) -> tuple[TrajectoryGroup, ...]:
        """One full batch of groups, sampled by weights that are `version` or, asynchronously, not much older."""

    def metrics(self) -> dict[str, float]:
        """Numbers of groups that were dropped, replaced or left out to make the last batch. None by default."""
        return {}


class Rollouts(BatchSource, Protocol):
    """A source of training batches, with what a run needs around the trainer. By default nothing runs between them."""

    def set_weights_version(self, version: int) -> None:
        """Notification that the engines now hold the weights of this version. Ignored by default."""
        return  # with a body, no subclass has to define it

    @property
    def epoch(self) -> int:
        """Number of complete passes over the data."""

    def state(self) -> dict[str, Any]:
        """Position in the data, as a checkpoint stores it."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""

    async def close(self) -> None:
        """Cancel the samples that are still being drawn. There are none by default."""
        return


class SynchronousRollouts(Rollouts):
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


@attrs.frozen(kw_only=True)
class FullLengthRollouts(Rollouts):
    """Batches of random tokens, which replace sampled `Rollouts`. Equal seeds give equal batches."""

    prompts: int
    """Number of groups in a batch."""

    samples: int
    """Number of samples in a group."""

    prompt_tokens: int
    answer_tokens: int
    vocabulary: int
    """Number of token ids; tokens are drawn below it."""

    has_logprobs: bool = True
    """Whether samples come with log-probabilities, as if all tokens were equally likely."""

    seed: int = 0

    async def next_batch(self, version: int) -> tuple[TrajectoryGroup, ...]:
        """One full batch, as if weights of this version had sampled it."""
        random = np.random.default_rng([self.seed, version])
        return tuple(self._group(number, version, random) for number in range(self.prompts))

    @property
    def epoch(self) -> int:
        """Always 0: no data are read."""
        return 0

    def state(self) -> dict[str, Any]:
        """Empty: batches follow from the version."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Does nothing: there is no position in any data."""

    def _group(self, number: int, version: int, random: np.random.Generator) -> TrajectoryGroup:
        ids, length = self._tokens(self.prompt_tokens, random), self.answer_tokens
        prompt = Prompt(id=f"made up {number}", messages=(), token_ids=ids, env_class="made_up")
        samples = (
            Trajectory(
                prompt_id=prompt.id,
                sample_index=index,
                prompt_ids=ids,
                response_ids=self._tokens(length, random),
                loss_mask=(1,) * length,
                rollout_logprobs=(-math.log(self.vocabulary),) * length if self.has_logprobs else (),
                weight_versions=(version,) * length,
                # Rewards of neighbours differ, so that there are advantages and gradients.
                rewards=(TurnReward(token=length - 1, reward=float((number + index) % 2)),),
                stop_reason="stop",
            )
            for index in range(self.samples)
        )
        return TrajectoryGroup(prompt=prompt, trajectories=tuple(samples))

    def _tokens(self, count: int, random: np.random.Generator) -> tuple[int, ...]:
        return tuple(random.integers(self.vocabulary, size=count).tolist())
