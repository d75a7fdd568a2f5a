"""How near rollouts come to the ideal when environments are slow.

    python benchmarks/rollouts.py [--trajectories 256] [--turns 2] [--workers 32] [--milliseconds 50] [--coroutines]

Prints one JSON line, with the largest number of threads and CPU-seconds. Environments sleep or, with `--coroutines`,
await. The engine answers at once; the ideal is ceil(trajectories / workers) x milliseconds x turns: what environments
alone take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from _thread import _count  # listing /proc/self/task takes longer than a turn where there are thousands
from typing import Any

from skyrl.config import GeneratorConfig, InferenceEngineConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.envs import Env, EnvStep, register
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.processes.garbage import lasting_objects, seldom_collected
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import Prompt


class Instant:
    """An engine that says one token."""

    weight_version = 0

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """The same for every sample."""
        completion = Completion(token_ids=(1,), text="a", logprobs=(-1.0,), weight_versions=(0,), stop_reason="length")
        return (completion,) * len(request.keys)


class Characters:
    """A tokenizer of one token for each character."""

    all_special_ids = (0,)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Code points."""
        return list(map(ord, text))


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description="Measure rollouts with slow environments.")
    for name, default in (("trajectories", 256), ("turns", 2), ("workers", 32), ("milliseconds", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--coroutines", action="store_true")
    args = parser.parse_args()

    class Slow(Env):
        """Takes its time over each turn."""

        taken = 0

        def step(self, action: str) -> EnvStep:
            time.sleep(args.milliseconds / 1000)
            return self.turn()

        def turn(self) -> EnvStep:
            """The next turn, after the wait."""
            threads.add(_count())
            self.taken += 1
            done = self.taken == args.turns
            return EnvStep(reward=1.0, done=done, observations=() if done else ({"role": "user", "content": "on"},))

    class Awaits(Slow):
        """Takes its time over each turn, without a thread."""

        async def step(self, action: str) -> EnvStep:  # type: ignore[override]  # either is an environment
            await asyncio.sleep(args.milliseconds / 1000)
            return self.turn()

    threads: set[int] = set()
    register("slow", Awaits if args.coroutines else Slow)
    engines: list[Any] = [Instant()]
    lora = SkyRLLoraConfig()
    tokenizer: Any = Characters()
    generator = SkyRLGymGenerator(
        "model",
        lora,
        GeneratorConfig(max_turns=args.turns, use_conversation_multi_turn=False),
        SkyRLGymConfig(max_env_workers=args.workers),
        InferenceEngineClient(engines, tokenizer, "model", lora, InferenceEngineConfig()),
        tokenizer,
    )
    prompts = [
        Prompt(id=str(number), messages=({"role": "user", "content": "?"},), token_ids=(1,), env_class="slow")
        for number in range(args.trajectories // 8)
    ]
    start, began = time.perf_counter(), os.times()
    with lasting_objects(), seldom_collected():  # as in a run
        asyncio.run(generator.generate(prompts, sampling=SamplingParams(), samples_per_prompt=8, weight_version=0))
    seconds = time.perf_counter() - start
    used = os.times()
    ideal = math.ceil(args.trajectories / args.workers) * args.milliseconds / 1000 * args.turns
    result = {"seconds": seconds, "ideal": ideal, "ratio": seconds / ideal, "threads": max(threads)}
    cpu = {"user": used.user - began.user, "system": used.system - began.system}
    print(json.dumps({"benchmark": "rollouts", **vars(args), **result, **cpu}))


if __name__ == "__main__":
    main()
