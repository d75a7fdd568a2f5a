"""Choice of the sampled groups that make the batch: dynamic sampling, the zero-variance filter, greedy baselines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import attrs

from skyrl.config import AlgorithmConfig, GeneratorConfig
from skyrl.config.derive.algorithm_facts import estimator_facts
from skyrl.errors import RunError
from skyrl.rollout.filters import Gates, has_reward_variance, masked_out, with_replacements
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import Prompt, TrajectoryGroup
from skyrl.tree import evolve_at

Batch = tuple[TrajectoryGroup, ...]

Draw = Callable[[int, int], Awaitable[Batch]]
"""Draws a batch of groups, given the version of the weights that it updates and how many were drawn for it before."""


class BatchFilter:
    """Fills a batch, calling `draw` as often as necessary."""

    def __init__(
        self,
        draw: Draw,
        generator: SkyRLGymGenerator,
        config: GeneratorConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
    ) -> None:
        """`seed` is the run's; random choices follow from it and the version. `generator` samples baselines."""
        self._gates = Gates(algorithm.dynamic_sampling)
        self._draw, self._generator = draw, generator
        self._config, self._algorithm, self._seed = config, algorithm, seed
        self.metrics: dict[str, float] = {}
        """Numbers of groups that were dropped, replaced or left out to make the last batch."""

    async def batch(self, version: int) -> Batch:
        """One full batch for the update of weights of `version`. Raises `RunError` if dynamic sampling does not fill it
        within its limit.
        """
        self.metrics = {}
        match self._algorithm.dynamic_sampling.type:
            case None:
                groups = await self._draw(version, 0)
            case "filter":
                groups = await self._filtered(version)
            case "replace":
                groups = await self._replaced(version)
        if self._algorithm.zero_variance_filter:
            tolerance = self._algorithm.zero_variance_filter_tol
            good = [has_reward_variance(group, tolerance=tolerance) for group in groups]
            self.metrics["reward/num_zero_variance_filtered"] = good.count(False)
            groups = tuple(group if keep else masked_out(group) for group, keep in zip(groups, good, strict=True))
        if estimator_facts(self._algorithm).compares_with_greedy:
            groups = await self._add_baselines(groups, version)
        return groups

    async def _filtered(self, version: int) -> Batch:
        """Groups that pass the filter, from several batches if necessary; the surplus of the last one is dropped.

        Groups of a stream have passed the same gates one by one (`StreamingRollouts._accept`): one batch is then
        enough, as a rule.
        """
        self._gates.left_out.clear()
        required: int | None = None
        kept: list[TrajectoryGroup] = []
        seen = batch_attempt = 0
        while required is None or len(kept) < required:
            self._check_batch_limit(batch_attempt, f"{len(kept)} groups of different rewards, {required} are needed")
            groups = await self._draw(version, batch_attempt)
            required, batch_attempt, seen = len(groups), batch_attempt + 1, seen + len(groups)
            kept += [group for group in groups if self._gates.pass_through(group)]
        self.metrics |= self._gates.metrics() | {
            "generate/sampled_batches": batch_attempt,
            "generate/groups_dropped": seen - len(kept),
            "generate/groups_left_over": len(kept) - required,
        }
        return tuple(kept[:required])

    async def _replaced(self, version: int) -> Batch:
        config, batch_attempt = self._algorithm.dynamic_sampling, 0
        while True:
            self._check_batch_limit(
                batch_attempt, f"a batch of which more than {config.min_replace_ratio:g} had different rewards"
            )
            groups = await self._draw(version, batch_attempt)
            batch_attempt += 1
            draw = Random(f"{self._seed}:{version}:{batch_attempt}")
            exchanged = with_replacements(groups, least_good=config.min_replace_ratio, draw=draw)
            if exchanged is not None:
                self.metrics |= {
                    "generate/sampled_batches": batch_attempt,
                    "generate/groups_dropped": (batch_attempt - 1) * len(groups),
                    "generate/groups_replaced": sum(not has_reward_variance(group) for group in groups),
                }
                return exchanged

    def _check_batch_limit(self, batch_attempt: int, progress: str) -> None:
        most = self._algorithm.dynamic_sampling.max_sample_batches
        if 0 < most <= batch_attempt:
            raise RunError(
                f"dynamic sampling drew {most} batches of prompts (trainer.algorithm.dynamic_sampling."
                f"max_sample_batches) without finding enough: {progress}. The task is too easy or too hard for the "
                "policy; raise the limit, or generator.n_samples_per_prompt, or turn dynamic sampling off"
            )

    async def _add_baselines(self, groups: Batch, version: int) -> Batch:
        """The groups, each with the reward of one greedy answer as its baseline. A group whose greedy answer has no
        reward is not trained on.
        """
        prompts: list[Prompt] = [group.prompt for group in groups]
        greedy = await self._generator.generate(
            prompts,
            sampling=evolve_at(self._config.sampling_params, "temperature", 0.0),
            samples_per_prompt=1,
            weight_version=version,
            purpose="baseline",
        )
        without = sum(answer.dropped for answer in greedy)
        self.metrics |= {"rollout/groups_without_baseline": without} if without else {}
        return tuple(
            attrs.evolve(masked_out(group) if answer.dropped else group, baseline=answer.rewards[0])
            for group, answer in zip(groups, greedy, strict=True)
        )
