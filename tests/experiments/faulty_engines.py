"""Engines and environments that take time of a clock that jumps, and fail as `Faults` says.

An engine is called as one on Ray is: a call ends with its process.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeVar

from attrs import frozen

from skyrl.config import GeneratorConfig
from skyrl.envs import Env, EnvStep
from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, InferenceEngine, InFlight, SampleKey
from skyrl.inference.gate import Gate
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.processes.calls import apply, name_of
from skyrl.processes.progress import Progress
from skyrl.rollout.env_calls import EpisodeError, SamplesInFlight
from skyrl.rollout.stream import StreamLimits
from skyrl.trajectory import Failure

T = TypeVar("T")

NEVER = float("inf")
HEARTBEAT_SECONDS = 60.0

ENV_SECONDS = 30.0
TOKENS = 4
SAMPLES = 3


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
    limits: StreamLimits
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

    async def load_weights(self, incoming: Any, version: int) -> None:
        if version >= _of(self._schedule.faults.refuse_weights, self._number):
            raise WeightSyncError(f"engine-{self._number} does not take the weights of version {version}")
        await asyncio.sleep(0.1)
        self.weight_version = version

    async def current_load(self) -> EngineLoad | None:
        return None

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

    def __init__(self, schedule: Schedule, at_a_time: int, deadline: float | None, _: SamplesInFlight) -> None:
        self._faults, self._deadline = schedule.faults, deadline
        self._random = Random(f"{schedule.seed}:environment")
        self._slots = asyncio.Semaphore(at_a_time)

    async def __call__(self, who: str, function: Callable[..., T], *args: Any) -> tuple[T, float]:
        started = asyncio.get_running_loop().time()
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
        return function(*args), asyncio.get_running_loop().time() - started


class OneTurn(Env):
    """Likes every answer."""

    def step(self, action: str) -> EnvStep:
        return EnvStep(reward=1.0, done=True)


class WeightTransport:
    """Weights that are there at once, where an engine takes them."""

    async def send(self, source: Any, client: InferenceEngineClient, version: int) -> None:
        await client.load_weights([None] * len(client.in_service), version)  # type: ignore[list-item]  # no weights are sent


class Asking:
    """A canary that asks every engine, and compares versions."""

    async def compare(
        self, source: Any, engines: Mapping[int, InferenceEngine], version: int, *, promised: bool = False
    ) -> dict[str, float]:
        key = SampleKey(run_seed=0, weight_version=version, prompt_id="canary", sample_index=0, purpose="canary")
        request = GenerationRequest(prompt_ids=(1,), sampling=GeneratorConfig().sampling_params, keys=(key,))
        answers = await asyncio.gather(*(engine.generate(request) for engine in engines.values()))
        assert {drawn for group in answers for answer in group for drawn in answer.weight_versions} <= {version}
        return {}


def _of(times: tuple[Any, ...], number: int) -> Any:
    return times[number] if number < len(times) else NEVER
