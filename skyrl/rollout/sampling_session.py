"""Groups that share limits: on trajectories in flight, environments at work, and failures. `GroupJudge` gives rewards
to all samples of a prompt at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from attrs import evolve

from skyrl.config import SkyRLGymConfig
from skyrl.envs.env import SampledAnswer
from skyrl.envs.group_rewards import GroupReward
from skyrl.envs.registry import MakeEnv, find_env_of_row
from skyrl.envs.rows import copied
from skyrl.errors import RunError
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.processes.gather_or_cancel import gather_or_cancel, wait_all
from skyrl.rollout.agent_episode import AgentEpisode
from skyrl.rollout.attempts import Attempts, FailureTally, FirstOutcome, outcome_of
from skyrl.rollout.env_calls import EpisodeError, SamplesInFlight, number
from skyrl.rollout.episode import Episode, EpisodeContext
from skyrl.rollout.filters import backfilled, masked_out
from skyrl.trajectory import Failure, Prompt, Skipped, Trajectory, TrajectoryGroup

_MANY = 2**62

TOGETHER_SECONDS = 1.0
"""Seconds that a group waits for all its environments to start before it samples those that have started."""


class SamplingSession:
    """Groups that share the context of their episodes and a tally of failures, from `SkyRLGymGenerator.session`."""

    def __init__(
        self,
        context: EpisodeContext,
        gym: SkyRLGymConfig,
        tally: FailureTally,
        key: SampleKey,
        *,
        samples_per_prompt: int,
        user_env_class: str | None,
        together: int | None,
        in_flight: SamplesInFlight | None = None,
    ) -> None:
        """`key` identifies the samples except for their prompt, weights and attempt."""
        self.tally, self._in_flight = tally, in_flight or SamplesInFlight()
        self._context, self._gym, self._key = context, gym, key
        self._samples, self._user_env_class = samples_per_prompt, user_env_class
        self._attempts = Attempts(gym, tally, self._sample_first_turns)
        self._judge = GroupJudge(context, gym, tally)
        self._all_sampled = asyncio.Barrier(together) if together else None
        self._waits_for_all = together is not None or bool(context.config.inference_engine.deterministic)
        self._slots = asyncio.Semaphore(
            max(1, (context.config.max_trajectories_in_flight or _MANY) // samples_per_prompt)
        )

    def task_of(self, prompt: Prompt) -> MakeEnv:
        """Factory of the prompt's environment. Raises `TaskError`."""
        return find_env_of_row(prompt.env_class, self._user_env_class, self._gym)

    async def group(
        self, prompt: Prompt, *, weight_version: int, attempt: int = 0, occurrence: int = 0
    ) -> TrajectoryGroup:
        """All samples of a prompt; see `SkyRLGymGenerator.generate`."""
        key = evolve(
            self._key, prompt_id=prompt.id, weight_version=weight_version, attempt=attempt, occurrence=occurrence
        )
        keys = [evolve(key, sample_index=index) for index in range(self._samples)]
        async with self._slots:
            self.tally.begins(self._samples)
            self._in_flight.begin(self._samples)
            try:
                return await self._group(prompt, self.task_of(prompt), keys)
            finally:
                self.tally.ends(self._samples)
                self._in_flight.end(self._samples)

    async def _group(self, prompt: Prompt, make: MakeEnv, keys: Sequence[SampleKey]) -> TrajectoryGroup:
        """Samples of a prompt, each with an environment of its own."""
        if self._context.agent is None:
            trajectories = await self._play(prompt, make, keys)
        else:  # an agent plays each sample and sends its own requests to the policy
            episodes = [AgentEpisode(self._context, prompt, make, key) for key in keys]
            trajectories = await gather_or_cancel([self._attempts.run_agent(episode) for episode in episodes])
        if isinstance(make, GroupReward):
            trajectories = await self._judge.judge_group(prompt, make, trajectories)
        group = TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories))
        group = backfilled(group) if self._gym.failed_samples == "fill" else group
        return masked_out(group) if group.dropped else group  # a dropped group still counts in the size of the batch

    async def _play(self, prompt: Prompt, make: MakeEnv, keys: Sequence[SampleKey]) -> list[Trajectory]:
        episodes = [Episode(self._context, prompt, make, key) for key in keys]
        try:
            return await self._play_together(episodes)
        finally:
            await gather_or_cancel([self._attempts.closed(episode) for episode in episodes if episode.is_open])

    async def _play_together(self, episodes: Sequence[Episode]) -> list[Trajectory]:
        """Play episodes whose first turns are one request if they start in time, so that the prompt is prefilled once.

        An environment that takes longer to start does not delay the others, unless results have to be bitwise equal:
        rounding depends on the rows of a request, which must then not depend on timing.
        """
        begins = [asyncio.ensure_future(outcome_of(episode.begin())) for episode in episodes]
        try:
            _, late = await asyncio.wait(begins, timeout=None if self._waits_for_all else TOGETHER_SECONDS)
            indices = range(len(episodes))
            waves = [[index for index in indices if begins[index] not in late]]
            waves += [[index] for index in indices if begins[index] in late]
            played = await gather_or_cancel([self._wave(episodes, begins, wave) for wave in waves])
        finally:
            for begin in begins:
                begin.cancel()
            await wait_all(begins)
        rows = dict(zip(chain(*waves), chain(*played), strict=True))
        return [rows[index] for index in indices]

    async def _wave(
        self, episodes: Sequence[Episode], begins: Sequence[asyncio.Future[FirstOutcome]], indices: Sequence[int]
    ) -> list[Trajectory]:
        """Sample the episodes at `indices` together, once they have started."""
        own = [episodes[index] for index in indices]
        first_outcomes = [await begins[index] for index in indices]
        first = await self._sample_first_turns(own, first_outcomes)
        if self._all_sampled:
            await self._all_sampled.wait()
        return await gather_or_cancel(
            [self._attempts.sample(*start) for start in zip(own, first_outcomes, first, strict=True)]
        )

    async def _sample_first_turns(
        self, episodes: Sequence[Episode], first_outcomes: Sequence[FirstOutcome]
    ) -> list[Completion | None]:
        """The first completion of each episode that began; those that begin with the same tokens ask together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, (episode, request) in enumerate(zip(episodes, first_outcomes, strict=True)):
            if isinstance(request, GenerationRequest) and not episode.too_long:
                alike.setdefault(request.prompt_ids, []).append(index)
        completions: list[Completion | None] = [None] * len(episodes)

        async def ask(ids: tuple[int, ...], indices: list[int]) -> None:
            start = time.perf_counter()
            keys = tuple(episodes[index].key for index in indices)
            answers = await self._context.client.generate(
                GenerationRequest(prompt_ids=ids, sampling=self._context.sampling, keys=keys)
            )
            if len(answers) != len(keys):
                raise RunError(
                    f"an engine gave {len(answers)} completions to prompt {keys[0].prompt_id} where {len(keys)} were "
                    "asked for"
                )
            for index, answer in zip(indices, answers, strict=True):
                completions[index] = answer
                episodes[index].waited_for_the_engine(time.perf_counter() - start)

        await gather_or_cancel([ask(ids, indices) for ids, indices in alike.items()])
        return completions


class GroupJudge:
    """Calls a reward function with the answers of a group, again while it fails, up to `max_attempts` times."""

    def __init__(self, context: EpisodeContext, gym: SkyRLGymConfig, tally: FailureTally) -> None:
        self._context, self._tally = context, tally
        self._attempts, self._retried = gym.max_attempts, frozenset(gym.retried_failures)

    async def judge_group(self, prompt: Prompt, reward: GroupReward, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """The samples with their rewards. Those that failed before, or never had a turn, are not compared."""
        judged = [row for row in rows if _waits(row)]
        outcome = await self._outcome(prompt, reward, judged) if judged else ((), {})
        if isinstance(outcome, Mapping):
            return [_unrewarded(row, **outcome) if _waits(row) else row for row in rows]
        rewards, measured = iter(outcome[0]), outcome[1]
        return [self._rewarded(row, next(rewards), measured) if _waits(row) else row for row in rows]

    async def _outcome(
        self, prompt: Prompt, reward: GroupReward, rows: Sequence[Trajectory]
    ) -> tuple[tuple[float | None, ...], Mapping[str, float]] | Mapping[str, Any]:
        """A reward or None for each row, and the group's metrics; or fields of a trajectory that say why not."""
        failures: list[Failure] = []
        while True:
            try:
                return await self._rewards(prompt, reward, rows)
            except EpisodeError as error:
                if isinstance(error.outcome, Skipped):
                    return {"skipped": error.outcome.reason}
                failures.append(error.outcome)
            self._tally.count(failures[-1])
            if len(failures) >= self._attempts or failures[-1].kind not in self._retried:
                return {"failed": True, "failures": tuple(failures)}

    async def _rewards(
        self, prompt: Prompt, reward: GroupReward, rows: Sequence[Trajectory]
    ) -> tuple[tuple[float | None, ...], Mapping[str, float]]:
        subject = f"{prompt.env_class}, judging the group of prompt {prompt.id},"
        decode = self._context.tokenizer.decode
        answers = [prompt.full_answer(decode(row.response_ids, skip_special_tokens=True)) for row in rows]
        extras: dict[str, Any] = {"data_source": prompt.data_source, **copied(dict(prompt.extras))}
        sampled = [SampledAnswer(token_ids=row.response_ids, version=row.weight_versions[0]) for row in rows]
        measured: dict[str, float] = {}
        values, _ = await self._context.call(
            subject, reward.rewards, prompt.question, answers, extras, sampled, measured
        )
        numbers = {name: number(value, f"{subject} measured {name} =") for name, value in measured.items()}
        rewards = (None if value is None else number(value, f"{subject} gave the reward") for value in values)
        return tuple(rewards), numbers

    def _rewarded(self, row: Trajectory, reward: float | None, measured: Mapping[str, float]) -> Trajectory:
        if reward is None:
            return _unrewarded(row, skipped="the reward function gives None: it has no reward for this sample")
        if row.stop_reason != "stop" and self._context.config.zero_reward_on_non_stop:
            reward = 0.0
        *before, last = row.rewards
        return evolve(row, rewards=(*before, evolve(last, reward=reward)), metrics={**row.metrics, **measured})


def _waits(row: Trajectory) -> bool:
    return bool(row.rewards) and not row.missing


def _unrewarded(row: Trajectory, *, failures: Sequence[Failure] = (), **changes: Any) -> Trajectory:
    """The sample with no reward."""
    return evolve(row, rewards=(), failures=(*row.failures, *failures), **changes)
