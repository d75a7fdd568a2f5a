"""Rewards that are given to all samples of a prompt at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from skyrl.config import SkyRLGymConfig
from skyrl.envs.env import SampledAnswer
from skyrl.envs.group_rewards import GroupReward
from skyrl.envs.rows import copied
from skyrl.rollout.attempts import FailureTally
from skyrl.rollout.env_calls import EpisodeError, number
from skyrl.rollout.episode import EpisodeContext
from skyrl.trajectory import Failure, Prompt, Skipped, Trajectory


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
