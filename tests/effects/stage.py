"""A stage on which a run samples without an engine, without threads and without waiting: time passes only there.

Engine and environments take a fixed time by the stage's clock, so that what happens in which order, and which deadlines
are missed, follows from the configuration alone.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from skyrl.errors import SkyRLError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.rollout.env_calls import _EnvCall
from skyrl.rollout.threads import ThreadCall, Workers
from tests.effects.probe import Scene

ENGINE_SECONDS = 0.25
"""Time of every request."""

FAILING = "cannot be judged"
"""Answer that makes the environment raise an exception."""


class _Clock(selectors.DefaultSelector):
    """Passes over the time that nothing happens in."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that never happens"
            self.now += max(timeout, 0)
        return ready


class StageLoop(asyncio.SelectorEventLoop):
    """An event loop on which a second takes no time."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class SimulatedRun(BasePPOExp):
    """An experiment whose samples are written down in advance, with a log of what was asked and judged at what time."""

    def __init__(self, scene: Scene, *, failing: bool = False) -> None:
        """`failing`: the environment never judges the first sample of the first prompt."""
        super().__init__(scene.run)
        self.log: list[tuple[float, str, object]] = []
        self.failing = failing

    def get_inference_client(self) -> InferenceEngineClient:
        trainer = self.cfg.trainer
        lora, engine = trainer.policy.model.lora, self.cfg.generator.inference_engine
        engines: Any = [_Engine(self)]  # which is asked for samples alone
        return InferenceEngineClient(engines, self.tokenizer, self.model_path, lora, engine)

    def write(self, event: str, of: object) -> None:
        """Log something that happens now."""
        self.log.append((round(asyncio.get_running_loop().time(), 3), event, of))


class _Engine:
    """An engine that draws the same tokens for the same sample."""

    weight_version = 0

    def __init__(self, stage: SimulatedRun) -> None:
        self._stage, self._first = stage, ""

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        samples = [(key.prompt_id, key.sample_index) for key in request.keys]
        self._stage.write("asked", (request.prompt_ids, request.sampling, samples))
        self._first = self._first or request.keys[0].prompt_id
        await asyncio.sleep(ENGINE_SECONDS)
        return tuple(self._drawn(key, request) for key in request.keys)

    def _drawn(self, key: SampleKey, request: GenerationRequest) -> Completion:
        """The second sample of a prompt is cut off; others end, at a stop text where there is one."""
        fails = self._stage.failing and key.prompt_id == self._first and key.sample_index == 0
        text = FAILING if fails else f"é{key.attempt}" if key.sample_index == 2 else f"answer {key.turn}"
        ids = self._stage.tokenizer.encode(text + "".join(request.sampling.stop or ()))
        reason = "length" if key.sample_index == 1 else "stop"
        ends = reason == "stop" and not request.sampling.stop
        ids += [self._stage.tokenizer.eos_token_id] if ends else []
        nothing = (0.0,) * len(ids)
        versions = (0,) * len(ids)
        return Completion(
            token_ids=tuple(ids),
            text=text,
            logprobs=nothing,
            weight_versions=versions,
            stop_reason=reason,  # type: ignore[arg-type]  # one of the two
        )


def _works_on(stage: SimulatedRun) -> Callable[[Workers], None]:
    """What a thread does, without one: a call of an environment takes a half to two and a half seconds."""
    numbers = itertools.count()

    def work(workers: Workers) -> None:
        go_on(workers, None)

    def go_on(workers: Workers, finished_call: ThreadCall | None) -> None:
        call = workers._next_call(finished_call)
        if call is None:
            return
        assert isinstance(call, _EnvCall)
        stage.write("called", call.function.__name__)
        if any(isinstance(arg, str) and arg == FAILING for arg in call.args):
            call.function = _raising

        def finish() -> None:
            call.run()
            go_on(workers, call)

        asyncio.get_running_loop().call_later(0.5 * (1 + next(numbers) % 5), finish)

    return work


def _raising(*_: object) -> None:
    raise RuntimeError("this answer cannot be judged")


def staged(stage: SimulatedRun, perform: Callable[[SimulatedRun], Awaitable[object]]) -> dict[str, object]:
    """What is performed: its end, or the error that ends it, and the log."""

    async def performed() -> object:
        return await perform(stage)

    with (
        mock.patch("skyrl.rollout.env_calls._THREADS.run", lambda work: work()),
        mock.patch.object(Workers, "_work", _works_on(stage)),
        mock.patch("skyrl.rollout.threads.PATIENCE", 0.0),
        asyncio.Runner(loop_factory=StageLoop) as runner,
        stage.resources,
    ):
        try:
            end = runner.run(performed())
        except SkyRLError as error:
            end = f"{type(error).__name__}: {error}"
    return {"end": end, "log": stage.log}
