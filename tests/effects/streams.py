"""Observables of asynchronous rollouts: how far they run ahead, and what becomes of their samples."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from attrs import evolve

from skyrl.data.cursor import PromptCursor
from skyrl.data.prompts import PromptDataset
from skyrl.errors import RunError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.factories import in_flight_policy, stream_limits
from skyrl.experiments.sampling import prompt_cursor, sampled_rollouts
from skyrl.rollout.stream import GroupStream
from skyrl.tools.virtual_time import run_in_virtual_time
from skyrl.trajectory import Prompt, TrajectoryGroup
from tests.effects.probe import Scene, observable
from tests.rollout.scripted import trajectory

STEPS = 6


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(id=str(number), messages=(), token_ids=(number,), env_class="gsm8k") for number in range(count)]


@observable("the groups that are begun ahead of the training, and how long a batch is waited for")
def ahead(scene: Scene) -> object:
    """No group ends: the stream begins what it may, twice, and gives up in virtual time."""

    async def never(prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("it never ends")

    async def watch() -> object:
        cursor = PromptCursor(prompts_of(8), scene.run.trainer.train_batch_size, seed=0)
        stream = GroupStream(cursor, never, stream_limits(scene.run, STEPS), lambda group: True)
        stream.set_weights_version(0)
        observed = [stream.running]
        stream.set_weights_version(1)
        observed.append(stream.running)
        since = asyncio.get_running_loop().time()
        try:
            await stream.take(1)
        except RunError:
            observed.append(round(asyncio.get_running_loop().time() - since))
        await stream.close()
        return observed

    return run_in_virtual_time(watch())


class Instant:
    """A generator, and its own session and tally, whose samples are there at once, drawn by two versions of the
    weights.
    """

    tally: Any

    def session(self, **_: object) -> Any:
        self.tally = self
        return self

    def reset(self) -> None:
        """Nothing failed."""

    async def group(self, prompt: Prompt, *, weight_version: int, attempt: int) -> TrajectoryGroup:
        rows = [
            evolve(
                trajectory(float(reward), reward),
                response_ids=(2, 3),
                loss_mask=(1, 1),
                rollout_logprobs=(-1.0, -1.0),
                weight_versions=(weight_version, weight_version + 1),
            )
            for reward in (0, 1)
        ]
        return TrajectoryGroup(prompt=prompt, trajectories=tuple(rows))

    async def generate(self, prompts: Any, **options: Any) -> tuple[TrajectoryGroup, ...]:
        return tuple([await self.group(prompt, weight_version=0, attempt=0) for prompt in prompts])


@observable("the source of batches, its first batch, and the tokens in it that are trained on")
def first_batch(scene: Scene) -> object:
    dataset: Any = PromptDataset(prompts=tuple(prompts_of(12)))
    generator: Any = Instant()  # it has what rollouts call
    cursor = prompt_cursor(scene.run, dataset)
    source = sampled_rollouts(scene.run, cursor, generator, total_steps=STEPS, describe_waits=tuple)

    async def take() -> object:
        source.set_weights_version(0)
        groups = await source.next_batch(0)
        await source.close()
        return [(group.prompt.id, [row.loss_mask for row in group.trajectories]) for group in groups]

    return type(source).__name__, asyncio.run(take())


@observable("what becomes of samples that are being drawn when new weights come")
def interruption(scene: Scene) -> object:
    return in_flight_policy(scene.run)


@observable("the versions of the weights that engines get")
def versions_sent(scene: Scene) -> object:
    experiment: Any = experiment_class(scene.run)(scene.run)
    experiment.__dict__ |= {"client": Engines(), "policy": None}
    sync = experiment.get_weight_sync(Engines())
    sent: list[int] = []

    async def send() -> dict[str, float]:
        sync._sent_version = sync._newest
        sent.append(sync._newest)
        return {}

    async def train() -> list[int]:
        sync._send = send
        for version in range(5):
            await sync.publish(version)
        return sent

    with experiment.resources:
        return asyncio.run(train())


class Engines:
    """Engines that hold whatever weights they were sent, and rollouts that are informed of them."""

    holds_weights = True
    metrics: ClassVar[dict[str, float]] = {}

    def set_weights_version(self, version: int) -> None:
        """Nothing begins."""
