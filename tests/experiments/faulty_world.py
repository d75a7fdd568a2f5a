"""Asynchronous rollouts on a clock that jumps: everything of ours is real, engines and environments are not.

`Faults` says what goes wrong. An engine is called as one on Ray is: a call ends with its process.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, TypeVar

import pytest
from attrs import frozen

from skyrl.config import AlgorithmConfig, GeneratorConfig, InferenceEngineConfig, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.data.cursor import PromptCursor
from skyrl.envs import Env, EnvStep
from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.client import InferenceEngineClient
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, InFlight, SampleKey
from skyrl.inference.gate import Gate
from skyrl.inference.remote_engine import RemoteEngine
from skyrl.processes.calls import apply, name_of
from skyrl.processes.progress import Progress
from skyrl.rollout.env_calls import EpisodeError
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.stream import Limits
from skyrl.rollout.streaming import StreamingRollouts
from skyrl.trajectory import Failure, Prompt, TrajectoryGroup
from skyrl.weight_sync.publish import WeightSync

T = TypeVar("T")

NEVER = float("inf")
HEARTBEAT_SECONDS = 60.0

ENV_SECONDS = 30.0
TOKENS = 4
SAMPLES = 3
PROMPTS = 40


@frozen(kw_only=True)
class Faults:
    """What goes wrong, and when by the clock. Engines are counted from 0."""

    slow: frozenset[int] = frozenset()
    """Engines that take 20 times as long."""

    die: tuple[float, ...] = ()
    """When the process of each engine ends."""

    hang: tuple[float, ...] = ()
    """From when on each engine answers nothing."""

    refuse_weights: tuple[int, ...] = ()
    """From which version on each engine takes no weights any more."""

    short_answers_from: float = NEVER
    """From when on engines give one completion too few."""

    env_fails: float = 0.0
    """Share of the calls of environments that raise."""

    env_hangs: float = 0.0
    """Share of the calls of environments that never return."""

    env_deadline: float | None = ENV_SECONDS


@frozen(kw_only=True)
class Schedule:
    """A run: sizes, durations and faults."""

    seed: int
    limits: Limits
    steps: int
    engines: int
    max_num_seqs: int
    in_flight: InFlight
    interval: int
    """Steps between new weights."""

    train_seconds: float
    faults: Faults


class FakeEngine:
    """Draws tokens of random durations, and stands still between two of them while it is paused. Knows its version."""

    def __init__(self, number: int, schedule: Schedule) -> None:
        self.weight_version = 0
        self._number, self._schedule = number, schedule
        self._random = Random(f"{schedule.seed}:{number}")
        self._requests, self._tokens = Gate(), Gate()
        self._drawing = 0

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        counted = len(request.keys) if request.keys[0].purpose == "train" else 0
        async with self._requests:
            assert self._drawing == 0 or self._drawing + counted <= self._schedule.max_num_seqs
            self._drawing += counted
            try:
                versions = [await self._token() for _ in range(TOKENS)]
            finally:
                self._drawing -= counted
        answer = Completion(
            token_ids=tuple(range(TOKENS)),
            text="text",
            logprobs=(-1.0,) * TOKENS,
            weight_versions=tuple(versions),
            stop_reason="stop",
        )
        short = asyncio.get_running_loop().time() >= self._schedule.faults.short_answers_from
        return (answer,) * (len(request.keys) - short)

    async def _token(self) -> int:
        async with self._tokens:
            await asyncio.sleep(self._random.expovariate(0.05 if self._number in self._schedule.faults.slow else 1.0))
            return self.weight_version

    async def pause(self, in_flight: InFlight = "finish") -> None:
        await self._requests.shut(keep=in_flight != "finish")
        await self._tokens.shut()

    async def resume(self) -> None:
        self._requests.open()
        self._tokens.open()

    async def load_weights(self, arrival: Any, version: int) -> None:
        if version >= _of(self._schedule.faults.refuse_weights, self._number):
            raise WeightSyncError(f"engine-{self._number} does not take the weights of version {version}")
        await asyncio.sleep(0.1)
        self.weight_version = version

    async def sleep(self) -> bool:
        return False

    async def wake(self) -> None:
        """It has no memory."""

    async def close(self) -> None:
        """It holds nothing."""


class EngineHandle:
    """What `RayHandle` promises: calls end with the process, and soon after it gives no sign of life any more."""

    def __init__(self, number: int, schedule: Schedule, progress: Progress) -> None:
        self.name = f"engine-{number}"
        self._engine, self._progress = FakeEngine(number, schedule), progress
        self._hangs = _of(schedule.faults.hang, number)
        self._ends, self._why = min(
            (_of(schedule.faults.die, number), f"{self.name} died"),
            (self._hangs + HEARTBEAT_SECONDS, f"{self.name} gave no sign of life for {HEARTBEAT_SECONDS:g} s"),
        )
        self._ended = False

    def within(self, seconds: float) -> EngineHandle:
        return self

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ended:
            raise ProcessError(self._why)
        with self._progress.waiting_for(f"{self.name} in {name_of(method)[1]}"):
            try:
                async with asyncio.timeout_at(self._ends):
                    result = apply(self._engine, method, args, kwargs)
                    result = await result if inspect.isawaitable(result) else result
                    if asyncio.get_running_loop().time() >= self._hangs:
                        await asyncio.Event().wait()
                    return result
            except TimeoutError:
                self._ended = True
                raise ProcessError(self._why) from None


class VirtualEnvCalls:
    """`EnvCalls` without threads: a call takes time of the clock, fails or hangs, and has the same deadline."""

    def __init__(self, schedule: Schedule, at_a_time: int, deadline: float | None) -> None:
        self._faults, self._deadline = schedule.faults, deadline
        self._random = Random(f"{schedule.seed}:environment")
        self._slots = asyncio.Semaphore(at_a_time)

    async def __call__(self, who: str, function: Callable[..., T], *args: Any) -> T:
        async with self._slots:
            drawn = self._random.random()
            hangs = drawn < self._faults.env_hangs
            try:
                async with asyncio.timeout(self._deadline):
                    await asyncio.sleep(1e9 if hangs else self._random.expovariate(1.0))
            except TimeoutError:
                raise EpisodeError(Failure(kind="timeout", reason=f"{who} gave no answer")) from None
        if drawn < self._faults.env_hangs + self._faults.env_fails:
            raise EpisodeError(Failure(kind="raised", reason=f"{who} raised"))
        return function(*args)


class OneTurn(Env):
    """Likes every answer."""

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=1.0, done=True)


class Road:
    """Weights that are there at once, where an engine takes them."""

    async def carry(self, source: Any, client: InferenceEngineClient, version: int) -> None:
        await client.load_weights([None] * len(client.in_service), version)  # type: ignore[list-item]


class Asking:
    """A canary that asks every engine, and compares versions."""

    async def compare(self, source: Any, engines: Sequence[InferenceEngine], version: int) -> dict[str, float]:
        key = SampleKey(run_seed=0, weight_version=version, prompt_id="canary", sample_index=0, purpose="canary")
        request = GenerationRequest(prompt_ids=(1,), sampling=GeneratorConfig().sampling_params, keys=(key,))
        answers = await asyncio.gather(*(engine.generate(request) for engine in engines))
        assert {drawn for each in answers for answer in each for drawn in answer.weight_versions} <= {version}
        return {}


class World:
    """One run, trained on by a loop that takes its time and looks at the bounds whenever a group begins or is taken."""

    def __init__(self, schedule: Schedule, patch: pytest.MonkeyPatch) -> None:
        self.schedule, self.trained, self.oldest = schedule, Counter[str](), 0
        limits = schedule.limits
        patch.setattr("skyrl.rollout.generator.EnvCalls", lambda *settings: VirtualEnvCalls(schedule, *settings))
        patch.setattr("skyrl.rollout.session.find_task", lambda *_: OneTurn)
        progress = Progress()
        engines = InferenceEngineConfig(max_num_seqs=schedule.max_num_seqs)
        handles: list[Any] = [EngineHandle(number, schedule, progress) for number in range(schedule.engines)]
        self.client = InferenceEngineClient(
            [RemoteEngine(handle) for handle in handles],
            None,
            "a/model",
            SkyRLLoraConfig(),
            engines,
            in_flight=schedule.in_flight,
        )
        config = GeneratorConfig(n_samples_per_prompt=SAMPLES, inference_engine=engines)
        gym = SkyRLGymConfig(step_timeout_seconds=schedule.faults.env_deadline, max_failed_share=1.0)
        generator = SkyRLGymGenerator("a/model", SkyRLLoraConfig(), config, gym, self.client, None, seed=schedule.seed)
        self.prompts = [
            Prompt(id=str(number), messages=(), token_ids=(number,), env_class="one") for number in range(PROMPTS)
        ]
        self.rollouts = StreamingRollouts(
            self._cursor(), self.prompts, generator, config, AlgorithmConfig(), limits, waits=progress.waits
        )
        self._stream = self.rollouts._stream
        self._stream._sample = self._watched(self._stream._sample)
        self._weights = WeightSync(
            None,  # type: ignore[arg-type]
            self.client,
            Road(),
            Asking(),  # type: ignore[arg-type]
            arrived=self.rollouts.weights_are,
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
        given = Counter(p.id for _ in range(state["cursor"]["batches_taken"]) for p in cursor.take())
        assert self.trained + Counter(kept) + Counter(state["prompts"]) == given

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


def _of(times: tuple[Any, ...], number: int) -> Any:
    return times[number] if number < len(times) else NEVER
