"""Rollouts that continue while the trainer trains: `next_batch` over a stream of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import attrs

from skyrl.config import AlgorithmConfig, GeneratorConfig
from skyrl.data.cursor import PromptCursor
from skyrl.errors import RunError
from skyrl.processes.calls import summary
from skyrl.rollout.batch_filter import Batch, BatchFilter
from skyrl.rollout.filters import is_kept
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.rollout.stream import GroupStream, StreamLimits
from skyrl.trajectory import Prompt, TokenRow, Trajectory, TrajectoryGroup

Accept = Callable[[TrajectoryGroup], bool]
"""Whether a group may be trained on; one that may not is replaced by another prompt's."""

MOST_REFUSED_IN_A_ROW = 1000
"""Number of refused groups after which the run fails; the size of 30 batches if that is more."""

_ACCEPT = "the function of trainer.fully_async.accept"


class StreamingRollouts:
    """Batches from a `GroupStream`: the same to the trainer as synchronous rollouts, except that groups are older.

    With `limits.staleness` 0 they equal synchronous rollouts: the same prompts, sampled by the same weights.
    """

    def __init__(
        self,
        cursor: PromptCursor,
        prompts: Sequence[Prompt],
        generator: SkyRLGymGenerator,
        config: GeneratorConfig,
        algorithm: AlgorithmConfig,
        limits: StreamLimits,
        *,
        accept: Accept | None = None,
        mask_older_tokens: bool = False,
        seed: int = 0,
        waits: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`prompts` are those of the cursor. With `mask_older_tokens`, only the tokens of the newest weights are
        trained on in a trajectory that several versions sampled. `waits`: see `GroupStream`.
        """
        self._prompts, self._limits, self._algorithm = prompts, limits, algorithm
        self._user_accepts, self._mask_older = accept, mask_older_tokens
        self._stream = GroupStream(cursor, self._sample, limits, self._accept, waits)
        self._selection = BatchFilter(self._draw, generator, config, algorithm, seed=seed)
        self._session = generator.session(
            sampling=config.sampling_params,
            samples_per_prompt=config.n_samples_per_prompt,
            samples=limits.batch * config.n_samples_per_prompt,
        )
        self._metrics: dict[str, float] = {}
        self._refused = self._refused_in_a_row = 0
        self._cursor = cursor

    async def next_batch(self, version: int) -> Batch:
        """The next batch. Raises `RunError` if none can be filled; its message says what is missing."""
        self._metrics = {}
        return await self._selection.batch(version)

    async def _draw(self, version: int, attempt: int) -> Batch:
        waiting = self._stream.waiting
        taken = await self._stream.take(version)
        self._session.tally.reset()
        groups = [group for group, _ in taken]
        lags = [version - begun for _, begun in taken]
        rows = [row for group in groups for row in group.trajectories]
        versions = [len({v for step in row.steps for v in step.weight_versions}) for row in rows]
        self._metrics = {
            "async/staleness_mean": fmean(lags),
            "async/staleness_max": max(lags),
            "async/staleness_min": min(lags),
            "async/staleness_ratio": fmean(lag > 0 for lag in lags),
            **{f"async/groups_of_age_{lag}": lags.count(lag) for lag in sorted(set(lags))},
            "async/groups_waiting": waiting,
            "async/groups_running": self._stream.running,
            "async/groups_refused": self._refused,
            "async/groups_resampled": self._stream.resampled,
            "async/room": self._stream.room,
            "async/trajectories_of_several_versions": sum(number > 1 for number in versions),
        }
        self._refused = self._stream.resampled = 0
        return tuple(map(_newest_tokens, groups)) if self._mask_older else tuple(groups)

    async def _sample(self, prompt: Prompt, version: int, attempt: int) -> TrajectoryGroup:
        return await self._session.group(prompt, weight_version=version, attempt=attempt)

    def _accept(self, group: TrajectoryGroup) -> bool:
        settings = self._algorithm.dynamic_sampling
        wanted = settings.type != "filter" or is_kept(group, settings)
        accepted = wanted and self._asked_user(group)
        self._refused += not accepted
        most = settings.max_sample_batches
        if not wanted and 0 < most * self._limits.batch <= self._refused:
            raise RunError(
                f"dynamic sampling refused {self._refused} groups since the last batch, as many as are in {most} "
                "batches (trainer.algorithm.dynamic_sampling.max_sample_batches), because all samples of their prompt "
                "had the same reward, or too few or too many succeeded. The task is too easy or too hard for the "
                "policy; raise the limit, or generator.n_samples_per_prompt, or turn dynamic sampling off"
            )
        return accepted

    def _asked_user(self, group: TrajectoryGroup) -> bool:
        """The answer of the user's function. Raises `RunError` if it fails, returns no bool or refuses everything."""
        if self._user_accepts is None:
            return True
        try:
            answer: object = self._user_accepts(group)
        except Exception as error:
            raise RunError(f"{_ACCEPT} raised {summary(error)} for the group of prompt {group.prompt.id}") from error
        if type(answer).__name__ not in ("bool", "bool_"):  # the latter is numpy's
            raise RunError(
                f"{_ACCEPT} returned {answer!r:.100} for the group of prompt {group.prompt.id}; it has to return True "
                "or False"
            )
        self._refused_in_a_row = 0 if answer else self._refused_in_a_row + 1
        if self._refused_in_a_row >= max(MOST_REFUSED_IN_A_ROW, 30 * self._limits.batch):
            raise RunError(
                f"{_ACCEPT} refused {self._refused_in_a_row} groups in a row, the last of which is that of prompt "
                f"{group.prompt.id} with rewards {list(group.rewards)!r:.100}: with such groups no batch is ever full"
            )
        return bool(answer)

    def metrics(self) -> dict[str, float]:
        left_out = self._cursor.left_out
        return self._selection.metrics | self._metrics | ({"data/prompts_left_out": left_out} if left_out else {})

    def weights_are(self, version: int) -> None:
        self._stream.weights_are(version)

    @property
    def epoch(self) -> int:
        return self._cursor.epoch_after(self._stream.consumed // self._limits.batch)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, which may be in a synchronous run."""
        if "cursor" not in state:
            taken = int(state["batches_taken"]) * self._limits.batch
            state = {"cursor": state, "prompts": [], "finished": [], "consumed": taken, "trained": taken}
        self._stream.load_state(state, self._prompts)

    async def close(self) -> None:
        await self._stream.close()


def _newest_tokens(group: TrajectoryGroup) -> TrajectoryGroup:
    return attrs.evolve(group, trajectories=tuple(map(_without_older_tokens, group.trajectories)))


def _without_older_tokens(row: Trajectory) -> Trajectory:
    """A copy of the trajectory in which only tokens of its newest weights are trained on."""
    newest = max((version for step in row.steps for version in step.weight_versions), default=0)

    def mask(step: TokenRow | Trajectory) -> tuple[int, ...]:
        drawn = zip(step.loss_mask, step.weight_versions, strict=True)
        return tuple(trained if version == newest else 0 for trained, version in drawn)

    earlier = tuple(attrs.evolve(step, loss_mask=mask(step)) for step in row.earlier)
    return attrs.evolve(row, earlier=earlier, loss_mask=mask(row))
