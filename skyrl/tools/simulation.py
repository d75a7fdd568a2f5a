"""Simulates a run without its computation: the real scheduler of asynchronous rollouts, in virtual time.

    skyrl simulate run.toml --like runs/measured

Engines, environments and learners are replaced by the time they take. The simulation shows what determines throughput:
which part waits for which, and how old samples get.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from random import Random
from statistics import NormalDist, fmean, median
from typing import Any

from attrs import evolve, frozen

from skyrl.data.cursor import PromptCursor
from skyrl.rollout.stream import GroupStream, StreamLimits
from skyrl.tools.virtual_time import run_in_virtual_time
from skyrl.trajectory import Prompt, TrajectoryGroup

_NORMAL = NormalDist()
_NOTHING = 1e-9
_P90 = _NORMAL.inv_cdf(0.9)


@frozen(kw_only=True)
class Seconds:
    """Distribution of durations: log-normal with this mean and 90th percentile, cut off at the longest."""

    mean: float
    p90: float
    longest: float
    """Upper bound of durations, since answers have a maximum length."""

    def draw(self, random: Random) -> float:
        """Draw a duration; the mean itself if the percentile or the bound is not above it."""
        if self.mean <= 0 or min(self.p90, self.longest) <= self.mean:
            return min(self.mean, self.longest)
        mu, sigma = _log_normal(self)
        return min(random.lognormvariate(mu, sigma), self.longest)


@cache
def _log_normal(target: Seconds) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm, before the cut: the pair with the given percentile whose mean after
    the cut is nearest to the given one.
    """
    fits = ((math.log(target.p90) - _P90 * sigma, sigma) for sigma in (step / 200 for step in range(1, 1000)))
    return min(fits, key=lambda fit: abs(_mean_of_the_cut(fit[0], fit[1], target.longest) - target.mean))


def _mean_of_the_cut(mu: float, sigma: float, longest: float) -> float:
    """Mean of min(X, longest), where the logarithm of X is normal."""
    end = (math.log(longest) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(end - sigma) + longest * (1 - _NORMAL.cdf(end))


@frozen(kw_only=True)
class World:
    """Durations and sizes of a simulated run."""

    limits: StreamLimits
    samples_per_prompt: int
    slots: int
    """Number of answers that all engines generate concurrently; each takes as long as it would alone."""

    answer: Seconds
    """Engine time of an answer in seconds, summed over all turns."""

    environment: Seconds
    """Environment time of an answer in seconds, without waiting for a worker."""

    environment_workers: int
    """Number of environments that run concurrently."""

    train_seconds: float
    """Seconds of a step from a full batch to new weights."""

    sync_seconds: float
    interrupt: bool
    """Whether new weights interrupt answers in progress instead of waiting for them."""

    shared: float = 0.0
    """Share of its speed that each side loses while engines and learners compute at the same time: 0 if they have
    separate devices, 0.5 if they share all cores or GPUs evenly.
    """

    seed: int = 0


@frozen(kw_only=True)
class Outcome:
    """Result of a simulation."""

    steps: int
    seconds: float
    trajectories: int
    engines_idle: float
    """Share of the total slot time in which nothing was generated."""

    learners_idle: float
    """Share of the time in which learners waited for a batch."""

    groups_by_age: Mapping[int, int]
    """Age -> number of groups, where the age is the number of versions between the weights that started a group and
    those that it trained.
    """

    @property
    def trajectories_per_second(self) -> float:
        """Throughput in trajectories trained on per second."""
        return self.trajectories / self.seconds


def simulate(world: World, steps: int) -> Outcome:
    """Simulate `steps` training steps. Raises `RunError` for a deadlock, which is a defect of skyrl."""
    return run_in_virtual_time(_Simulation(world).run(steps))


def measured(records: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Durations of a real run from its `metrics.jsonl`: medians over all steps but the first, which is a warm-up."""
    steps = [record for record in records if "timing/step" in record][1:]
    if not steps:
        return {}

    def typical(name: str) -> float:
        return median(record.get(name, 0.0) for record in steps)

    def durations(of: str) -> Seconds:
        mean, p90, longest = (typical(f"generate/trajectory_time_{of}_{which}") for which in ("mean", "p90", "max"))
        return Seconds(mean=mean, p90=p90, longest=longest)

    sync = typical("timing/sync_weights")
    tells_waiting = any("generate/trajectory_time_env_run_mean" in record for record in steps)
    return {
        "answer": durations("llm"),
        "environment": durations("env_run" if tells_waiting else "env"),  # older versions do not record env_run
        "train_seconds": typical("timing/step") - typical("timing/generate") - sync,
        "sync_seconds": sync,
    }


def splits(world: World, engine_gpus: int, learner_gpus: int, unit: int) -> Iterator[tuple[int, World]]:
    """Other splits of the same GPUs: the number of GPUs for engines, and the resulting world.

    The number of slots is proportional to the engines' GPUs, and training time is inversely proportional to the
    learners'.
    """
    gpus = engine_gpus + learner_gpus
    for share in range(unit, gpus, unit):
        slots, seconds = world.slots * share // engine_gpus, world.train_seconds * learner_gpus / (gpus - share)
        yield share, evolve(world, slots=max(1, slots), train_seconds=seconds)


class _Pace:
    """Concurrent work that proceeds at a common speed, which may change."""

    def __init__(self) -> None:
        self._speed, self._changed = 1.0, asyncio.Event()

    def set(self, speed: float) -> None:
        """Set the speed: 1 is full speed, 0 a standstill."""
        if speed != self._speed:
            self._speed, before, self._changed = speed, self._changed, asyncio.Event()
            before.set()

    async def work(self, seconds: float) -> float:
        """Do work that takes `seconds` at full speed. Returns the seconds that it took, without standstills."""
        clock, elapsed = asyncio.get_running_loop().time, 0.0
        while seconds > _NOTHING:
            speed, changed, start = self._speed, self._changed, clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds / speed if speed else None):
                    await changed.wait()
            passed = clock() - start
            seconds -= passed * speed
            elapsed += passed if speed else 0.0
        return elapsed


class _Simulation:
    def __init__(self, world: World) -> None:
        self._world, self._random = world, Random(world.seed)
        self._slots = asyncio.Semaphore(world.slots)
        self._workers = asyncio.Semaphore(world.environment_workers)
        self._open = asyncio.Event()
        self._open.set()
        self._quiet = asyncio.Event()
        self._drawing, self._busy = 0, 0.0
        self._trains = self._gets_weights = False
        self._engines, self._learners = _Pace(), _Pace()
        limits = world.limits
        prompts = [Prompt(id=str(number), messages=(), token_ids=(0,), env_class="") for number in range(limits.batch)]
        cursor = PromptCursor(prompts, limits.batch, world.seed)
        self._stream = GroupStream(cursor, self._group, limits, lambda group: True)

    async def run(self, steps: int) -> Outcome:
        """The training loop: take a batch, train, transfer weights."""
        clock, world = asyncio.get_running_loop().time, self._world
        waited, ages = 0.0, Counter[int]()
        for version in range(steps):
            self._stream.set_weights_version(version)
            start = clock()
            batch = await self._stream.take(version)
            waited += clock() - start
            ages.update(version - old for _, old in batch)
            self._trains = True
            self._set_speeds()
            await self._learners.work(world.train_seconds)
            self._trains = False
            self._set_speeds()
            self._open.clear()  # engines take no new work until the transfer is complete
            while not world.interrupt and self._drawing:
                self._quiet.clear()
                await self._quiet.wait()
            self._gets_weights = True
            self._set_speeds()
            await asyncio.sleep(world.sync_seconds)
            self._gets_weights = False
            self._set_speeds()
            self._open.set()
        seconds = clock()
        await self._stream.close()
        return Outcome(
            steps=steps,
            seconds=seconds,
            trajectories=steps * world.limits.batch * world.samples_per_prompt,
            engines_idle=max(0.0, 1 - self._busy / (world.slots * seconds)),
            learners_idle=waited / seconds,
            groups_by_age=dict(sorted(ages.items())),
        )

    def _set_speeds(self) -> None:
        """Set both speeds: each side is slower while both compute, and engines stand still during weight transfer."""
        together = 1.0 - self._world.shared
        self._engines.set(0.0 if self._gets_weights else together if self._trains else 1.0)
        self._learners.set(together if self._drawing and not self._gets_weights else 1.0)

    async def _group(self, prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
        await asyncio.gather(*(self._trajectory() for _ in range(self._world.samples_per_prompt)))
        return TrajectoryGroup(prompt=prompt, trajectories=())

    async def _trajectory(self) -> None:
        async with self._slots:
            await self._open.wait()
            self._drawing += 1
            self._set_speeds()
            seconds = await self._engines.work(self._world.answer.draw(self._random))
            self._busy += seconds
            self._drawing -= 1
            self._set_speeds()
            self._quiet.set()
        async with self._workers:
            await asyncio.sleep(self._world.environment.draw(self._random))


def summary(outcome: Outcome) -> dict[str, Any]:
    """The result in the form that `--json` prints."""
    ages = [age for age, count in outcome.groups_by_age.items() for _ in range(count)]
    return {
        "steps": outcome.steps,
        "seconds": outcome.seconds,
        "seconds_per_step": outcome.seconds / outcome.steps,
        "trajectories": outcome.trajectories,
        "trajectories_per_second": outcome.trajectories_per_second,
        "engines_idle": outcome.engines_idle,
        "learners_idle": outcome.learners_idle,
        "staleness_mean": fmean(ages),
        "groups_by_age": {str(age): count for age, count in outcome.groups_by_age.items()},
    }
