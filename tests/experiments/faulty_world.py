"""Asynchronous rollouts on a clock that jumps: everything of ours is real, engines and environments are not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from skyrl.config import AlgorithmConfig, GeneratorConfig, InferenceEngineConfig, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.data.cursor import PromptCursor
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.pool.engine_proxy import EngineProxy
from skyrl.processes.progress import Progress
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.stream import StreamingRollouts
from skyrl.trajectory import Prompt, TrajectoryGroup
from skyrl.weight_sync.publish import WeightSync
from tests.experiments.faulty_engines import (
    SAMPLES,
    Asking,
    EngineHandle,
    OneTurn,
    Schedule,
    VirtualEnvCalls,
    WeightTransport,
)

PROMPTS = 40


class World:
    """One run, trained on by a loop that takes its time and looks at the bounds whenever a group begins or is taken."""

    def __init__(self, schedule: Schedule, patch: pytest.MonkeyPatch) -> None:
        self.schedule, self.trained, self.oldest = schedule, Counter[str](), 0
        limits = schedule.limits
        patch.setattr("skyrl.rollout.generator.EnvCalls", lambda *settings: VirtualEnvCalls(schedule, *settings))
        patch.setattr("skyrl.rollout.sampling_session.find_env_of_row", lambda *_: OneTurn)
        progress = Progress()
        engines = InferenceEngineConfig(max_num_seqs=schedule.max_num_seqs)
        handles: list[Any] = [EngineHandle(number, schedule, progress) for number in range(schedule.engines)]
        unused: Any = None  # no tokenizer: engines and environments exchange token ids only
        self.client = InferenceEngineClient(
            [EngineProxy(handle) for handle in handles],
            unused,
            "a/model",
            SkyRLLoraConfig(),
            engines,
            in_flight=schedule.in_flight,
        )
        config = GeneratorConfig(n_samples_per_prompt=SAMPLES, inference_engine=engines)
        gym = SkyRLGymConfig(step_timeout_seconds=schedule.faults.env_deadline, max_failed_share=1.0)
        generator = SkyRLGymGenerator(
            "a/model", SkyRLLoraConfig(), config, gym, self.client, unused, seed=schedule.seed
        )
        self.prompts = [
            Prompt(id=str(number), messages=(), token_ids=(number,), env_class="one") for number in range(PROMPTS)
        ]
        self.rollouts = StreamingRollouts(
            self._cursor(), generator, config, AlgorithmConfig(), limits, describe_waits=progress.waits
        )
        self._stream = self.rollouts._stream
        self._stream._sample = self._watched(self._stream._sample)
        self._weights = WeightSync(
            None,  # type: ignore[arg-type]  # stand-in
            self.client,
            WeightTransport(),
            Asking(),  # type: ignore[arg-type]  # stand-in
            on_version=self.rollouts.set_weights_version,
            interval=schedule.interval,
        )

    async def train(self) -> None:
        """To the last step, or to what ends the run."""
        try:
            await self._weights.publish(0)
            for version in range(self.schedule.steps):
                groups = await self.rollouts.next_batch(version)
                assert [len(group.trajectories) for group in groups] == [SAMPLES] * self.schedule.limits.batch
                self.trained.update(group.prompt.id for group in groups)
                metrics = self.rollouts.metrics()
                assert 0 <= metrics["async/staleness_min"] <= metrics["async/staleness_max"]
                assert metrics["async/staleness_max"] <= self.schedule.limits.staleness
                self._look_at_bounds(version + 1)
                await asyncio.sleep(self.schedule.train_seconds)
                await self._weights.publish(version + 1)
        finally:
            await self.rollouts.close()
            await self.client.close()

    def assert_nothing_is_lost_or_doubled(self) -> None:
        """What the data gave is trained on, kept for a checkpoint, or to be sampled."""
        state = self.rollouts.state()
        kept = [finished["group"]["prompt"]["id"] for finished in state["finished"]]
        cursor = self._cursor()
        expected = Counter(p.id for _ in range(state["cursor"]["batches_taken"]) for p in cursor.take())
        assert self.trained + Counter(kept) + Counter(state["prompts"]) == expected

    def _cursor(self) -> PromptCursor:
        return PromptCursor(self.prompts, self.schedule.limits.batch, self.schedule.seed % 97)

    def _watched(self, sample: Callable[..., Awaitable[TrajectoryGroup]]) -> Callable[..., Any]:
        async def watched(prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
            self._look_at_bounds(self.trained.total() // self.schedule.limits.batch)
            return await sample(prompt, version, attempt)

        return watched

    def _look_at_bounds(self, steps: int) -> None:
        """After so many steps; `version` is that of the engines, which may be older than the learner's."""
        stream, limits = self._stream, self.schedule.limits
        outstanding = stream.running + stream.waiting
        assert stream.running <= limits.concurrency
        assert outstanding <= limits.queue
        assert steps * limits.batch + outstanding <= limits.total
        assert steps * limits.batch + outstanding <= (limits.staleness + stream._version + 1) * limits.batch
