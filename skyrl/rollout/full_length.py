"""Made-up batches in which every sample has the maximum length, so that they take as much memory as a batch can."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


@attrs.frozen(kw_only=True)
class FullLengthRollouts:
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

    def _group(self, number: int, version: int, random: np.random.Generator) -> TrajectoryGroup:
        prompt = self._tokens(self.prompt_tokens, random)
        name = f"made up {number}"
        samples = tuple(self._sample(name, prompt, number, index, version, random) for index in range(self.samples))
        return TrajectoryGroup(
            prompt=Prompt(id=name, messages=(), token_ids=prompt, env_class="made_up"), trajectories=samples
        )

    def _sample(
        self, name: str, prompt: tuple[int, ...], group: int, index: int, version: int, random: np.random.Generator
    ) -> Trajectory:
        """A made-up sample. Rewards of neighbours differ, so that there are advantages and gradients."""
        length = self.answer_tokens
        return Trajectory(
            prompt_id=name,
            sample_index=index,
            prompt_ids=prompt,
            response_ids=self._tokens(length, random),
            loss_mask=(1,) * length,
            rollout_logprobs=(-math.log(self.vocabulary),) * length if self.has_logprobs else (),
            weight_versions=(version,) * length,
            rewards=(TurnReward(token=length - 1, reward=float((group + index) % 2)),),
            stop_reason="stop",
        )

    def _tokens(self, count: int, random: np.random.Generator) -> tuple[int, ...]:
        return tuple(random.integers(self.vocabulary, size=count).tolist())

    def metrics(self) -> dict[str, float]:
        """Empty: no group was left out."""
        return {}

    def set_weights_version(self, version: int) -> None:
        """Does nothing: no group is sampled ahead."""

    @property
    def epoch(self) -> int:
        """Always 0: no data are read."""
        return 0

    def state(self) -> dict[str, Any]:
        """Empty: batches follow from the version."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Does nothing: there is no position in any data."""

    async def close(self) -> None:
        """Does nothing: nothing is running."""
