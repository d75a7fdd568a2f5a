"""What routing by prefixes saves of prompts, and limits that follow engines' queues of steps.

    python benchmarks/routing.py [--engines 4] [--seed 0]

Prints one JSON line. Engines are simulated: each has a cache of prompts and of the samples that it drew, draws one
token of each running sample in a step, and queues what it cannot run. Events are counted, not time:

- `prompt_tokens`: tokens of prompts that were not cached where they went, over those of requests that go to the engine
  with the fewest samples. Agents extend their conversations without saying which turn it is, and the samples of a
  prompt are asked for one by one.
- `steps`: until all samples are drawn, over those with fixed limits, where one engine runs a quarter of what the others
  do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any

from skyrl.config import InferenceEngineConfig, SamplingParams, SkyRLLoraConfig
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, SampleKey
from skyrl.inference.pool.admission import Admission
from skyrl.inference.pool.client import InferenceEngineClient

_BLOCK = 16
_CONVERSATIONS, _TURNS, _PROMPTS, _SAMPLES = 48, 6, 32, 8


class Simulated:
    """An engine that runs `most` samples at once; the caller makes its steps."""

    weight_version = 0

    def __init__(self, most: int) -> None:
        self.most, self.steps, self.computed = most, 0, 0
        self._cached: set[tuple[int, ...]] = set()
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._running: list[tuple[int, asyncio.Future[None]]] = []

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """As many tokens as are asked for, for each key."""
        self._prefill(request.prompt_ids)
        count = request.sampling.max_generate_length
        futures = [asyncio.get_running_loop().create_future() for _ in request.keys]
        self._queue.extend((count, future) for future in futures)
        await asyncio.gather(*futures)
        token_ids = tuple(random.Random(repr(request.prompt_ids)).choices(range(1000), k=count))
        self._remember((*request.prompt_ids, *token_ids))
        completion = Completion(
            token_ids=token_ids,
            text="",
            logprobs=(-1.0,) * count,
            weight_versions=(0,) * count,
            stop_reason="length",
        )
        return (completion,) * len(request.keys)

    async def current_load(self) -> EngineLoad:
        """Its queue."""
        return EngineLoad(waiting=len(self._queue))

    def step(self) -> None:
        """One token of each running sample."""
        while self._queue and len(self._running) < self.most:
            self._running.append(self._queue.popleft())
        self._running = [(left - 1, future) for left, future in self._running]
        for _, future in (entry for entry in self._running if entry[0] == 0):
            future.set_result(None)
        self._running = [entry for entry in self._running if entry[0]]

    def _prefill(self, ids: tuple[int, ...]) -> None:
        cached = next((end for end in _ends(ids) if ids[:end] in self._cached), 0)
        self.computed += len(ids) - cached
        self._remember(ids)

    def _remember(self, ids: tuple[int, ...]) -> None:
        self._cached.update(ids[:end] for end in _ends(ids))


def _ends(ids: tuple[int, ...]) -> Iterator[int]:
    """Ends of the blocks, the last one first."""
    return iter(range(len(ids) // _BLOCK * _BLOCK, 0, -_BLOCK))


class ByLoadAlone(Admission):
    """Requests go to the engine with the fewest samples."""

    def _engines_with_prefix(self, request: GenerationRequest) -> Iterator[Any]:
        return iter(())


class WithFixedLimits(Admission):
    """Every engine is given as many samples as it allows at first."""

    async def _adapt(self, served: Any) -> None:
        return


def asked(name: str, prompt: tuple[int, ...], tokens: int, sample: int = 0) -> GenerationRequest:
    """One sample of so many tokens."""
    key = SampleKey(run_seed=0, weight_version=0, prompt_id=name, sample_index=sample)
    return GenerationRequest(prompt_ids=prompt, sampling=SamplingParams(max_generate_length=tokens), keys=(key,))


async def run(engines: list[Simulated], work: list[Coroutine[Any, Any, Any]]) -> int:
    """Steps of all engines until the work is done."""
    steps, tasks = 0, asyncio.gather(*work)
    while not tasks.done():
        for _ in range(12):  # whoever can go on does
            await asyncio.sleep(0)
        for engine in engines:
            engine.step()
        steps += 1
    await tasks
    return steps


def client(kind: type[Admission], engines: list[Any]) -> InferenceEngineClient:
    """A client that admits requests in this way to these engines, which are given at most 64 samples at a time."""
    unused: Any = None
    engine_client = InferenceEngineClient(
        engines, unused, "model", SkyRLLoraConfig(), InferenceEngineConfig(max_num_seqs=64)
    )
    engine_client._admission = kind(engines, 64)
    return engine_client


def prompt_tokens(kind: type[Admission], count: int, seed: int) -> int:
    """Tokens of prompts that engines compute for agents and for groups."""
    engines = [Simulated(64) for _ in range(count)]
    engine_client, draws = client(kind, engines), random.Random(seed)

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(draws.choices(range(1000), k=draws.randint(least, most)))

    async def converse(number: int, messages: list[tuple[int, ...]]) -> None:
        history: tuple[int, ...] = ()
        for turn, more in enumerate(messages):
            history += more
            (answer,) = await engine_client.generate(asked(f"{number}.{turn}", history, 8 + (number + turn) % 24))
            history += answer.token_ids

    talks = [converse(number, [some(40, 120) for _ in range(_TURNS)]) for number in range(_CONVERSATIONS)]
    prompts = [(str(number), some(60, 200)) for number in range(_PROMPTS)]
    groups = [engine_client.generate(asked(name, ids, 32, n)) for name, ids in prompts for n in range(_SAMPLES)]
    asyncio.run(run(engines, [*talks, *groups]))
    return sum(engine.computed for engine in engines)


def steps(kind: type[Admission], count: int, seed: int) -> int:
    """Steps for samples with a long tail, where one engine runs a quarter of what the others do."""
    engines = [Simulated(8 if number == 0 else 32) for number in range(count)]
    engine_client, draws = client(kind, engines), random.Random(seed)
    lengths = [min(256, 8 + int(draws.expovariate(1 / 32))) for _ in range(count * 256)]
    samples = [engine_client.generate(asked(str(number), (number,), length)) for number, length in enumerate(lengths)]
    return asyncio.run(run(engines, list(samples)))


def ratios(count: int, seed: int) -> dict[str, float]:
    """What is left of prompt tokens, and of steps."""
    return {
        "prompt_tokens": prompt_tokens(Admission, count, seed) / prompt_tokens(ByLoadAlone, count, seed),
        "steps": steps(Admission, count, seed) / steps(WithFixedLimits, count, seed),
    }


def main() -> None:
    """Count once."""
    parser = argparse.ArgumentParser(description="Count what routing saves.")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(json.dumps({"benchmark": "routing", **vars(chosen), **ratios(chosen.engines, chosen.seed)}))


if __name__ == "__main__":
    main()
