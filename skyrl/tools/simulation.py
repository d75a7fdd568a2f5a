"""A run without its computing: the scheduler of asynchronous rollouts as it is, on a clock that jumps.

    skyrl simulate run.toml --like runs/measured

Engines, environments and learners are replaced by the time they take. What is left is what decides about throughput:
who waits for whom, and how old samples get.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping
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
    """Durations: a log-normal distribution, cut off at the longest, with this mean and 90th percentile."""

    mean: float
    p90: float
    longest: float
    """Upper bound of durations: answers end at a greatest length."""

    def draw(self, random: Random) -> float:
        """Constant where nothing is above the mean."""
        if self.mean <= 0 or min(self.p90, self.longest) <= self.mean:
            return min(self.mean, self.longest)
        mu, sigma = _log_normal(self)
        return min(random.lognormvariate(mu, sigma), self.longest)


@cache
def _log_normal(wanted: Seconds) -> tuple[float, float]:
    """Mean and deviation of the logarithm, before the cut. The heaviest tail that has the percentile and comes nearest
    to the mean stands for every heavier one.
    """
    fits = ((math.log(wanted.p90) - _P90 * sigma, sigma) for sigma in (step / 200 for step in range(1, 1000)))
    return min(fits, key=lambda fit: abs(_mean_of_the_cut(fit[0], fit[1], wanted.longest) - wanted.mean))


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
    """Answers that all engines draw at the same time; drawing one takes as long beside others as alone."""

    answer: Seconds
    """Seconds of engines for an answer, all turns together."""

    environment: Seconds
    """Seconds of an answer's environment, once it runs."""

    environment_workers: int
    """Environments that run at the same time."""

    train_seconds: float
    """Seconds of a step between a full batch and new weights."""

    sync_seconds: float
    interrupt: bool
    """New weights do not wait for answers that are being drawn."""

    shared: float = 0.0
    """Share of its speed that each side loses while engines draw and learners train at the same time: 0 where each has
    devices of its own, 0.5 where they share all cores or GPUs evenly.
    """

    seed: int = 0


@frozen(kw_only=True)
class Outcome:
    """Result of a simulation."""

    steps: int
    seconds: float
    trajectories: int
    engines_idle: float
    """Share of the time of all slots in which nothing was drawn."""

    learners_idle: float
    """Share of the time in which learners waited for a batch."""

    groups_by_age: Mapping[int, int]
    """Versions between the weights that began a group and those that it trained -> groups."""

    @property
    def trajectories_per_second(self) -> float:
        """Trained on."""
        return self.trajectories / self.seconds


def simulate(world: World, steps: int) -> Outcome:
    """Simulate so many training steps. Raises `RunError` for a deadlock, which is a defect of skyrl."""
    return run_in_virtual_time(_Simulation(world).run(steps))


def measured(records: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Durations of a real run from its `metrics.jsonl`: medians over the steps after the first, which warms up."""
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
        "environment": durations("env_run" if tells_waiting else "env"),  # metrics of an older version do not
        "train_seconds": typical("timing/step") - typical("timing/generate") - sync,
        "sync_seconds": sync,
    }


def splits(world: World, engine_gpus: int, learner_gpus: int, gpus: int, unit: int) -> list[tuple[int, World]]:
    """The same GPUs dealt out otherwise: how many of them are the engines', and the world that this makes.

    Slots grow with the engines' GPUs and training shrinks with the learners', both in proportion.
    """
    return [
        (
            share,
            evolve(
                world,
                slots=max(1, world.slots * share // engine_gpus),
                train_seconds=world.train_seconds * learner_gpus / (gpus - share),
            ),
        )
        for share in range(unit, gpus, unit)
    ]


class _Pace:
    """Work that all proceeds at the same speed, which changes."""

    def __init__(self) -> None:
        self._speed, self._changed = 1.0, asyncio.Event()

    def set(self, speed: float) -> None:
        """1 is full speed, 0 a standstill."""
        if speed != self._speed:
            self._speed, before, self._changed = speed, self._changed, asyncio.Event()
            before.set()

    async def work(self, seconds: float) -> float:
        """Do what takes so many seconds at full speed. Returns those that it took, without standstills."""
        clock, taken = asyncio.get_running_loop().time, 0.0
        while seconds > _NOTHING:
            speed, changed, begun = self._speed, self._changed, clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds / speed if speed else None):
                    await changed.wait()
            passed = clock() - begun
            seconds -= passed * speed
            taken += passed if speed else 0.0
        return taken


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
        self._stream = GroupStream(
            PromptCursor(prompts, limits.batch, world.seed), self._group, limits, lambda group: True
        )

    async def run(self, steps: int) -> Outcome:
        """The trainer's part."""
        clock, world = asyncio.get_running_loop().time, self._world
        waited, ages = 0.0, Counter[int]()
        for version in range(steps):
            self._stream.weights_are(version)
            begun = clock()
            taken = await self._stream.take(version)
            waited += clock() - begun
            ages.update(version - old for _, old in taken)
            await self._train()
            await self._sync()
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

    async def _train(self) -> None:
        self._trains = True
        self._set_speeds()
        await self._learners.work(self._world.train_seconds)
        self._trains = False
        self._set_speeds()

    def _set_speeds(self) -> None:
        """Both sides are slower while both compute; nothing is drawn while weights arrive."""
        together = 1.0 - self._world.shared
        self._engines.set(0.0 if self._gets_weights else together if self._trains else 1.0)
        self._learners.set(together if self._drawing and not self._gets_weights else 1.0)

    async def _sync(self) -> None:
        """New weights: engines take no new work until they are there."""
        self._open.clear()
        while not self._world.interrupt and self._drawing:
            self._quiet.clear()
            await self._quiet.wait()
        self._gets_weights = True
        self._set_speeds()
        await asyncio.sleep(self._world.sync_seconds)
        self._gets_weights = False
        self._set_speeds()
        self._open.set()

    async def _group(self, prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
        await asyncio.gather(*(self._trajectory() for _ in range(self._world.samples_per_prompt)))
        return TrajectoryGroup(prompt=prompt, trajectories=())

    async def _trajectory(self) -> None:
        async with self._slots:
            await self._open.wait()
            self._drawing += 1
            self._set_speeds()
            taken = await self._engines.work(self._world.answer.draw(self._random))
            self._busy += taken
            self._drawing -= 1
            self._set_speeds()
            self._quiet.set()
        async with self._workers:
            await asyncio.sleep(self._world.environment.draw(self._random))


def summary(outcome: Outcome) -> dict[str, Any]:
    """The result as `--json` prints it."""
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
