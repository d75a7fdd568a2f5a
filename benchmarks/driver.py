"""CPU time that the driver spends on samples beside the models: rollouts, collate, metrics and the trajectory file.

    make demo                                              the quick start's tokenizer, once
    python benchmarks/driver.py [--tokens 2000] [--steps 20] [--kept 256] [SAMPLES ...]

One JSON line. The engine and the environment answer at once, so that what is counted is the driver's own: milliseconds
a sample by phase, and the fit `a + b * tokens` of all phases together, from steps of 16 tokens and of TOKENS; of each
step KEPT samples (-1: all, which is a run's default) are written, `trainer.samples_per_step_kept`. `collections` is
garbage collection between the steps, as a run does it; `flat` is the largest over the smallest cost of rollouts and
collections among the sizes.
`growth_mb` is the resident memory after the last step less that after the second, peaks of a step left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from skyrl.config import GeneratorConfig, InferenceEngineConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.envs import Env, EnvStep, register
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.models.files.loading import load_tokenizer
from skyrl.processes.garbage import Collections, lasting_objects, seldom_collected
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.tracking.jsonlines import JsonLines, sample_record
from skyrl.tracking.sample_files import kept_groups
from skyrl.training.collate import collate
from skyrl.training.describe import describe
from skyrl.trajectory import Prompt, TrajectoryGroup

R = TypeVar("R")

SHORT = 16
"""Tokens of the answers that the fixed cost of a sample is measured with."""


class Instant:
    """An engine whose completions are made beforehand."""

    weight_version = 0

    def __init__(self, tokens: int) -> None:
        draw = random.Random(0)
        self._ready = [_completion(draw, tokens) for _ in range(64)]

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One for each sample."""
        return tuple(self._ready[key.sample_index % len(self._ready)] for key in request.keys)


def _completion(draw: random.Random, tokens: int) -> Completion:
    return Completion(
        token_ids=tuple(draw.randrange(256) for _ in range(tokens)),
        text="an answer",
        logprobs=tuple(-draw.random() for _ in range(tokens)),
        weight_versions=(0,) * tokens,
        stop_reason="stop",
    )


class Judged(Env):
    """Rewards every other sample."""

    given = 0

    def step(self, action: str) -> EnvStep:
        Judged.given += 1
        return EnvStep(reward=float(Judged.given % 2), done=True)


class Driver:
    """What the driver does with a batch, phase by phase, and the CPU-seconds of each."""

    def __init__(self, samples: int, tokens: int, kept: int, folder: Path, tokenizer: Any) -> None:
        self._kept = kept
        lora, engines = SkyRLLoraConfig(), [Instant(tokens)]
        client_engines: Any = engines
        self._generator = SkyRLGymGenerator(
            "model",
            lora,
            GeneratorConfig(),
            SkyRLGymConfig(),
            InferenceEngineClient(client_engines, tokenizer, "model", lora, InferenceEngineConfig()),
            tokenizer,
        )
        self._prompts = [
            Prompt(id=str(n), messages=({"role": "user", "content": "?"},), token_ids=(1,) * 16, env_class="judged")
            for n in range(samples // 8)
        ]
        self._lines, self._tokenizer = JsonLines(folder / "trajectories.jsonl"), tokenizer
        self._loop, self._collections = asyncio.new_event_loop(), Collections()
        self.seconds: dict[str, float] = {}

    def step(self, number: int) -> None:
        """One batch."""
        self._timed_batch(number)
        self._timed("collections", self._collections.between_steps)

    def _timed_batch(self, number: int) -> None:
        groups = self._timed("rollouts", lambda: self._loop.run_until_complete(self._sample()))
        self._timed("collate", lambda: collate(groups))
        self._timed("metrics", lambda: describe(groups))
        self._timed("writer", lambda: self._write(number, groups))

    async def _sample(self) -> tuple[TrajectoryGroup, ...]:
        return await self._generator.generate(
            self._prompts, sampling=SamplingParams(), samples_per_prompt=8, weight_version=0
        )

    def _write(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        self._lines.extend(
            sample_record(
                step, number, kept_group.group, trajectory, lambda ids: str(self._tokenizer.decode(list(ids)))
            )
            for number, kept_group in enumerate(kept_groups(step, groups, self._kept))
            for trajectory in kept_group.trajectories
        )

    def _timed(self, name: str, work: Callable[[], R]) -> R:
        began = time.process_time()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began
        return result


def run(samples: int, tokens: int, steps: int, kept: int, tokenizer: Any) -> dict[str, Any]:
    """Milliseconds of each phase for each sample, and the memory it took."""
    with tempfile.TemporaryDirectory() as folder, lasting_objects(), seldom_collected():
        driver, resident = Driver(samples, tokens, kept, Path(folder), tokenizer), []
        for step in range(steps):
            driver.step(step)
            resident.append(_resident_mb())
    milliseconds = {name: round(1000 * seconds / samples / steps, 4) for name, seconds in driver.seconds.items()}
    return {"milliseconds_a_sample": milliseconds, "growth_mb": round(resident[-1] - resident[min(1, steps - 1)])}


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description="Measure what a sample costs the driver.")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kept", type=int, default=-1)
    parser.add_argument("samples", type=int, nargs="*", default=[2048, 8192])
    args = parser.parse_args()
    register("judged", Judged)
    tokenizer = load_tokenizer(str(Path(__file__).parents[1] / "runs" / "quickstart-base" / "model"))
    short = run(args.samples[0], SHORT, args.steps, args.kept, tokenizer)
    results = {samples: run(samples, args.tokens, args.steps, args.kept, tokenizer) for samples in args.samples}
    fixed, total = (_sum(result) for result in (short, results[args.samples[0]]))
    sampling = [_sum(result, ("rollouts", "collections")) for result in results.values()]
    per_token = (total - fixed) / (args.tokens - SHORT)
    print(
        json.dumps(
            {
                "benchmark": "driver",
                "tokens": args.tokens,
                "steps": args.steps,
                "kept": args.kept,
                "milliseconds_a_sample": round(fixed - SHORT * per_token, 4),
                "microseconds_a_token": round(1000 * per_token, 4),
                "flat": round(max(sampling) / min(sampling), 2),
                "short": short,
                "samples": results,
            }
        )
    )


def _sum(result: dict[str, Any], phases: Sequence[str] = ()) -> float:
    """Milliseconds a sample of these phases, or of all."""
    milliseconds: dict[str, float] = result["milliseconds_a_sample"]
    return sum(milliseconds[name] for name in phases or milliseconds)


if __name__ == "__main__":
    main()
