"""Rollouts that continue while the trainer trains, never further ahead than the bound on staleness allows.

    GroupStream        starts groups, keeps them, and hands them over in batches
    StreamingRollouts  `next_batch` over a stream, for the trainer

A started group is in one of these states:

    prompt --_start_groups, while there is room--> running --accepted--> finished --take, oldest first--> in a batch
                                              |  |----refused--> gone; another prompt takes its place
                                              |-------failed---> its error is raised by `take`
    running or finished --too old, or of weights that were rolled back--> its prompt, which is sampled next
    running or finished --load_state--> gone; the checkpoint says which prompts follow

Nothing here polls: every event that may make room (a group ends, a batch is taken, new weights arrive) starts the
groups that fit. The stream is bounded at both ends: no more groups are started than the next `staleness + 1` steps can
train on, and a batch waits for groups that would otherwise be too old when their turn comes. So no group is trained on
more than `staleness` versions after the weights that started it, and none is discarded for its age. Prompts are sampled
again only if a run returned to a checkpoint or continues with a smaller bound.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs
from attrs import define, frozen

from skyrl.config import AlgorithmConfig, GeneratorConfig
from skyrl.data.cursor import PromptCursor, StreamCursor
from skyrl.data.group_lines import as_object, group_of
from skyrl.errors import RunError
from skyrl.planning.staleness import room_for_groups
from skyrl.rollout.batch_filter import Batch, BatchFilter
from skyrl.rollout.filters import Gate, Gates
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.trajectory import Prompt, TokenRow, Trajectory, TrajectoryGroup

Sample = Callable[[Prompt, int, int], Awaitable[TrajectoryGroup]]
"""Samples the group of a prompt, given the version of the weights and how often they sampled the prompt before."""

_SHOWN = 3
"""Largest number of groups that a message names as awaited, and of other waits."""

_CLOSING_SECONDS = 30.0
"""Seconds that cancelled groups have for their own cleanup."""


@frozen(kw_only=True)
class StreamLimits:
    """Bounds of a stream, counted in groups."""

    batch: int
    """Number of groups in a training step."""

    staleness: int
    """Maximum number of versions between the weights that started a group and those that it trains."""

    concurrency: int
    """Maximum number of groups that are sampled at the same time."""

    queue: int
    """Maximum number of groups started and not yet trained on, finished or not; at least a batch."""

    total: int
    """Groups of the whole run. None is started that would be trained on after its last step."""

    stall_seconds: float
    """The wait for a batch fails after this many seconds in which no group that may be trained on has ended."""


@define(eq=False)
class _StartedGroup:
    """A started group. Groups are numbered in the order of starting."""

    number: int
    prompt: Prompt
    version: int
    started_at: float
    group: TrajectoryGroup | None = None
    task: asyncio.Task[None] | None = None
    """The task that samples the group; None for one from a checkpoint."""

    stored: dict[str, Any] | None = None
    """The group as a checkpoint stores it, kept from the first checkpoint on."""

    draw: int = 0
    """Number of the draw that gave the prompt, if the sampler of prompts learns from rewards; a prompt that is sampled
    again keeps it."""

    @property
    def newest_version(self) -> int:
        """The newest version that sampled a token of the group; while it is being sampled, the one that started it."""
        rows = () if self.group is None else self.group.trajectories
        return max([self.version, *(version for row in rows for version in row.versions)])

    def as_stored(self) -> dict[str, Any]:
        """A finished group as a checkpoint stores it."""
        assert self.group is not None
        if self.stored is None:
            self.stored = {"version": self.version, "draw": self.draw, "group": as_object(self.group)}
        return self.stored


class GroupStream:
    """Starts groups, keeps them and hands them over in batches. Belongs to one event loop."""

    def __init__(
        self,
        cursor: PromptCursor | StreamCursor,
        sample: Sample,
        limits: StreamLimits,
        accept: Callable[[TrajectoryGroup], bool],
        describe_waits: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """A group that `accept` refuses gives up its place, and another prompt is sampled.

        `describe_waits` says what else the run waits for; the message about a stall names it.
        """
        self._cursor, self._sample, self._limits, self._accept = cursor, sample, limits, accept
        self._describe_waits = describe_waits
        self._prompts: deque[tuple[int, Prompt]] = deque()  # with the number of its draw
        self._started: dict[int, _StartedGroup] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._version = self._number = 0
        self.consumed = 0
        """Groups handed over since the start of the run."""
        self._trained_by_schedule = 0  # version x batch: the groups that fill the batches up to this version
        self._accepted_count = self._refused_count = 0  # groups that ended since the start of the session
        self._closed = False
        self._repeats: Counter[str] = Counter()
        self.resampled = 0
        """Number of groups that were given up and whose prompts are sampled again; a reader may reset it to 0."""

    @property
    def running(self) -> int:
        """Groups that are being sampled."""
        return sum(entry.group is None for entry in self._started.values())

    @property
    def waiting(self) -> int:
        """Groups that are finished and not trained on."""
        return len(self._started) - self.running

    @property
    def room(self) -> int:
        """Number of groups that may be started now."""
        limits, outstanding = self._limits, len(self._started)
        return min(
            room_for_groups(
                concurrency=limits.concurrency,
                running=self.running,
                accepted=self._trained_by_schedule + self.waiting,
                version=self._version,
                staleness=limits.staleness,
                batch=limits.batch,
            ),
            limits.queue - outstanding,
            limits.total - self._trained_by_schedule - outstanding,
        )

    def set_weights_version(self, version: int) -> None:
        """The engines sample from weights of this version from now on, so that more groups may be started.

        A version below the last means that the run rolled back to a checkpoint: samples of later weights are
        discarded.
        """
        if version < self._version:
            self._resample([entry for entry in self._sorted_by_age() if entry.newest_version > version])
        if version != self._version:
            self._version = version
            self._repeats.clear()
        self._start_groups()

    async def take(self, version: int) -> list[tuple[TrajectoryGroup, int]]:
        """A batch for the update of weights of `version`, oldest groups first, each with the version it was started
        with.

        If a batch was taken for this version before, its groups count as not trained on, and their places are free.
        Raises the error that ended a group, and `RunError` if no group ends for `stall_seconds` or none can be started.
        """
        # First, because room and age are counted from here: a batch taken for this version before was not trained on.
        self._trained_by_schedule = version * self._limits.batch
        self._resample(self._stale_groups(version))
        accepted, refused, until = -1, self._refused_count, 0.0
        while not self._ready(version):
            if self._failure is not None:
                raise self._failure
            self._start_groups()
            if self.running == 0:  # the wait would never end
                limits = self._limits
                raise RunError(
                    f"{self.waiting} groups are ready, a batch has {limits.batch}, and no other may begin: the engines "
                    f"hold version {self._version}, {self.consumed} groups were handed over, staleness "
                    f"{limits.staleness}, queue {limits.queue}, {limits.total} groups in the whole run"
                )
            # The deadline moves only when a group that may be trained on has ended: refused ones are no progress.
            if accepted != self._accepted_count:
                accepted, refused = self._accepted_count, self._refused_count
                until = asyncio.get_running_loop().time() + self._limits.stall_seconds
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                raise RunError(self._stalled(version, self._refused_count - refused)) from None
        batch = self._oldest_finished()
        for entry in batch:
            del self._started[entry.number]
        self.consumed += len(batch)
        self._trained_by_schedule = (version + 1) * self._limits.batch
        self._start_groups()  # the places of the batch are free
        return [(entry.group, entry.version) for entry in batch if entry.group is not None]

    async def close(self) -> None:
        """Cancel the groups that are being sampled, and cancel once more those whose cleanup hangs."""
        self._closed = True
        for _ in range(2):
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_CLOSING_SECONDS)

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores: finished groups, and the prompts that have to be sampled (again)."""
        started = self._started.values()
        prompts = [*((entry.draw, entry.prompt) for entry in started if entry.group is None), *self._prompts]
        return {
            "cursor": self._cursor.state(),
            "prompts": self._cursor.as_stored([prompt for _, prompt in prompts]),
            "draws": [draw for draw, _ in prompts],
            "finished": [entry.as_stored() for entry in started if entry.group is not None],
            "consumed": self.consumed,
            "trained": self._trained_by_schedule,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Groups that were being sampled start again; no prompt is lost and none is trained on twice.
        """
        self.resampled += self.running
        self._give_up(self._sorted_by_age())
        self._cursor.load_state(state["cursor"])
        prompts = self._cursor.of_stored(state["prompts"])
        draws = state.get("draws", [0] * len(state["prompts"]))  # absent from checkpoints before there were samplers
        self._prompts = deque(zip(draws, prompts, strict=True))
        self.consumed, self._trained_by_schedule = int(state["consumed"]), int(state["trained"])
        for stored in state["finished"]:
            group = group_of(stored["group"])
            self._add(stored.get("draw", 0), group.prompt, int(stored["version"]), 0.0).group = group

    def _ready(self, version: int) -> bool:
        """Whether the batch is full and all remaining groups can be trained on in time, a batch in each later step."""
        batch, size = self._oldest_finished(), self._limits.batch
        batch_numbers = {entry.number for entry in batch}
        later = [entry for entry in self._sorted_by_age() if entry.number not in batch_numbers]
        in_time = all(
            entry.version + self._limits.staleness >= version + 1 + index // size for index, entry in enumerate(later)
        )
        return len(batch) == size and in_time

    def _stale_groups(self, version: int) -> list[_StartedGroup]:
        """Groups that cannot be trained on in time, with one batch per step. They exist only if the bound was larger
        before.
        """
        late: list[_StartedGroup] = []
        for index, entry in enumerate(self._sorted_by_age()):
            if entry.version + self._limits.staleness < version + (index - len(late)) // self._limits.batch:
                late.append(entry)
        return late

    def _resample(self, groups: Sequence[_StartedGroup]) -> None:
        """Discard the groups; their prompts are sampled next."""
        self.resampled += len(groups)
        self._prompts.extendleft((entry.draw, entry.prompt) for entry in reversed(groups))
        self._give_up(groups)

    def _give_up(self, groups: Sequence[_StartedGroup]) -> None:
        for entry in groups:
            del self._started[entry.number]
            if entry.task is not None:
                entry.task.cancel()

    def _oldest_finished(self) -> list[_StartedGroup]:
        return [entry for entry in self._sorted_by_age() if entry.group is not None][: self._limits.batch]

    def _sorted_by_age(self) -> list[_StartedGroup]:
        """Groups by age of their weights, then in the order of starting; the two differ after a rollback."""
        return sorted(self._started.values(), key=lambda entry: entry.version)

    def _start_groups(self) -> None:
        """Start as many groups as there is room for. Called after everything that may make room."""
        for _ in range(0 if self._failure or self._closed else self.room):
            if not self._prompts:
                if not self._cursor.is_ready:
                    return  # until the groups that the next draws depend on have ended
                first = self._cursor.drawn
                self._prompts.extend(enumerate(self._cursor.take(), first))
            draw, prompt = self._prompts.popleft()
            # How often these weights sampled the prompt before, groups of a checkpoint included: each time with other
            # random numbers.
            kept = sum(item.prompt.id == prompt.id and item.version == self._version for item in self._started.values())
            repeat = max(self._repeats[prompt.id], kept)
            self._repeats[prompt.id] = repeat + 1
            loop = asyncio.get_running_loop()
            entry = self._add(draw, prompt, self._version, loop.time())
            entry.task = loop.create_task(self._run(entry, repeat))
            self._tasks.add(entry.task)
            entry.task.add_done_callback(self._tasks.discard)

    def _add(self, draw: int, prompt: Prompt, version: int, started_at: float) -> _StartedGroup:
        self._number += 1
        entry = self._started[self._number] = _StartedGroup(self._number, prompt, version, started_at, draw=draw)
        return entry

    async def _run(self, entry: _StartedGroup, repeat: int) -> None:
        """Sample a group; an error reaches the waiting trainer, unless the group was given up meanwhile."""
        try:
            group = await self._sample(entry.prompt, entry.version, repeat)
            if entry.number in self._started:
                self._cursor.observe(entry.draw, group.judged_rewards)
                if self._accept(group):
                    entry.group = group
                    self._accepted_count += 1
                else:
                    del self._started[entry.number]
                    self._refused_count += 1
                self._start_groups()
        except asyncio.CancelledError:
            if entry.number not in self._started or self._closed:
                raise
            message = f"the sampling of prompt {entry.prompt.id} was cancelled, but not by the run"
            self._failure = self._failure or RunError(message)
        except Exception as error:  # noqa: BLE001 - see above
            if entry.number in self._started:
                self._failure = self._failure or error
        self._changed.set()

    def _stalled(self, version: int, refused: int) -> str:
        now, limits = asyncio.get_running_loop().time(), self._limits
        late = [entry for entry in self._started.values() if entry.group is None]
        groups = [
            f"prompt {group.prompt.id} (begun {now - group.started_at:.0f} s ago by version {group.version})"
            for group in late
        ]
        none = f"only {refused}, which were refused, have" if refused else "none has"
        waits = self._describe_waits()
        return (
            f"the trainer is waiting for the batch of step {version + 1}: {self.waiting} of {limits.batch} groups are "
            f"ready, {len(late)} are being sampled, and {none} finished in the last {limits.stall_seconds:g} s "
            f"(trainer.fully_async.stall_timeout_seconds). Waited for: {_first_texts(groups)}"
            + (f"; who waits for whom: {_first_texts(waits)}" if waits else "")
        )


def _first_texts(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


class StreamingRollouts:
    """Batches from a `GroupStream`: the same to the trainer as synchronous rollouts, except that groups are older.

    With `limits.staleness` 0 they equal synchronous rollouts: the same prompts, sampled by the same weights.
    """

    def __init__(
        self,
        cursor: PromptCursor | StreamCursor,
        generator: SkyRLGymGenerator,
        config: GeneratorConfig,
        algorithm: AlgorithmConfig,
        limits: StreamLimits,
        *,
        accept: Gate | None = None,
        mask_older_tokens: bool = False,
        seed: int = 0,
        describe_waits: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """With `mask_older_tokens`, only the tokens of the newest weights are trained on in a trajectory that several
        versions sampled. `describe_waits`: see `GroupStream`.
        """
        self._limits, self._algorithm = limits, algorithm
        self._gates, self._mask_older = Gates(algorithm.dynamic_sampling, accept, batch=limits.batch), mask_older_tokens
        self._stream = GroupStream(cursor, self._sample, limits, self._accept, describe_waits)
        self._batch_filter = BatchFilter(self._draw, generator, config, algorithm, seed=seed)
        self._session = generator.session(
            sampling=config.sampling_params,
            samples_per_prompt=config.n_samples_per_prompt,
            samples=limits.batch * config.n_samples_per_prompt,
        )
        self._metrics: dict[str, float] = {}
        self._refused_since_batch = 0
        self._cursor = cursor

    async def next_batch(self, version: int) -> Batch:
        """The next batch. Raises `RunError` if none can be filled; its message says what is missing."""
        self._metrics = {}
        return await self._batch_filter.batch(version)

    async def _draw(self, version: int, batch_attempt: int) -> Batch:
        waiting = self._stream.waiting
        batch = await self._stream.take(version)
        self._session.tally.reset()
        groups = [group for group, _ in batch]
        lags = [version - start_version for _, start_version in batch]
        rows = [row for group in groups for row in group.trajectories]
        self._metrics = {
            "async/staleness_mean": fmean(lags),
            "async/staleness_max": max(lags),
            "async/staleness_min": min(lags),
            "async/staleness_ratio": fmean(lag > 0 for lag in lags),
            **{f"async/groups_of_age_{lag}": lags.count(lag) for lag in sorted(set(lags))},
            "async/groups_waiting": waiting,
            "async/groups_running": self._stream.running,
            "async/groups_refused": self._refused_since_batch,
            "async/groups_resampled": self._stream.resampled,
            "async/room": self._stream.room,
            "async/trajectories_of_several_versions": sum(len(row.versions) > 1 for row in rows),
            **self._gates.metrics(),
        }
        self._gates.left_out.clear()
        self._refused_since_batch = self._stream.resampled = 0
        if self._mask_older:
            groups = [
                attrs.evolve(group, trajectories=tuple(map(_mask_older_tokens, group.trajectories))) for group in groups
            ]
        return tuple(groups)

    async def _sample(self, prompt: Prompt, version: int, repeat: int) -> TrajectoryGroup:
        return await self._session.group(prompt, weight_version=version, attempt=repeat)

    def _accept(self, group: TrajectoryGroup) -> bool:
        """Whether the group may be trained on. It asks here so that another prompt takes a refused group's place at
        once. `BatchFilter` asks dynamic sampling again about the whole batch, and then refuses only groups that a
        checkpoint kept under other settings, or whose tokens were masked since.
        """
        before = self._gates.left_out.total()
        accepted = self._gates.pass_through(group)
        self._refused_since_batch += not accepted
        most = self._algorithm.dynamic_sampling.max_sample_batches
        if self._gates.left_out.total() > before and 0 < most * self._limits.batch <= self._refused_since_batch:
            raise RunError(
                f"dynamic sampling refused {self._refused_since_batch} groups since the last batch, as many as are in "
                f"{most} batches (trainer.algorithm.dynamic_sampling.max_sample_batches), because all samples of their "
                "prompt had the same reward, or too few or too many succeeded. The task is too easy or too hard for "
                "the policy; raise the limit, or generator.n_samples_per_prompt, or turn dynamic sampling off"
            )
        return accepted

    def metrics(self) -> dict[str, float]:
        return self._batch_filter.metrics | self._metrics | self._cursor.metrics()

    def set_weights_version(self, version: int) -> None:
        self._stream.set_weights_version(version)

    @property
    def epoch(self) -> int:
        return self._cursor.epoch_after(self._stream.consumed // self._limits.batch)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, which may be in a synchronous run."""
        if "cursor" not in state:
            consumed = int(state["batches_taken"]) * self._limits.batch
            state = {"cursor": state, "prompts": [], "finished": [], "consumed": consumed, "trained": consumed}
        self._stream.load_state(state)

    async def close(self) -> None:
        await self._stream.close()


def _mask_older_tokens(row: Trajectory) -> Trajectory:
    """A copy of the trajectory in which only tokens of its newest weights are trained on."""
    newest = max(row.versions, default=0)

    def mask(token_row: TokenRow) -> tuple[int, ...]:
        drawn = zip(token_row.loss_mask, token_row.weight_versions, strict=True)
        return tuple(trained if version == newest else 0 for trained, version in drawn)

    earlier = tuple(attrs.evolve(token_row, loss_mask=mask(token_row)) for token_row in row.earlier)
    return attrs.evolve(row, earlier=earlier, loss_mask=mask(row))
