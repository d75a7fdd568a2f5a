"""One sample of a prompt: an episode, which is repeated while its environment fails and there is time.

The outcome is a trajectory: with a reward, or without one if the sample failed for good or was skipped. A tally of all
failures ends a run that has too many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from attrs import evolve

from skyrl.config import SkyRLGymConfig
from skyrl.errors import RewardError
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.rollout.agent_episode import AgentEpisode
from skyrl.rollout.env_calls import EpisodeError
from skyrl.rollout.episode import Episode
from skyrl.trajectory import Failure, Skipped, Trajectory

T = TypeVar("T")
E = TypeVar("E", bound=Episode)

Play = Callable[[E, float | None], Coroutine[Any, Any, Trajectory]]
"""Plays an episode to its end, within the time of its sample."""

FirstOutcome = GenerationRequest | Failure | Skipped
"""Result of starting an episode: its first request, or why there is none."""

FirstTurns = Callable[[Sequence[Episode], Sequence[FirstOutcome]], Awaitable[list[Completion | None]]]

CLOSING_SECONDS = 5.0
"""Seconds that an environment may take to close when the time of its sample is over."""

_RETRY = 2**16
"""Added to `SampleKey.attempt` for each retry after a failure of the environment; larger than the number of times that
a prompt is drawn with the same weights, or that a batch is, which the lower bits count."""


SHOWN = 3
"""Number of reasons that a run reports when it stops."""


class FailureTally:
    """Counts the failures while one batch is sampled, and raises when there are too many."""

    def __init__(self, samples: int, max_share: float, *, attempts: int = 1) -> None:
        """`samples` is the size of a batch. The limit is the share `max_share` of the batch, or of all samples drawn
        meanwhile if those are more. Up to `attempts` failures, the most that one sample can have, are allowed in any
        case unless `max_share` is 0, so that a small batch survives what a large one does.
        """
        self._batch, self._max_share = samples, max_share
        self._least = attempts if max_share > 0 else 0
        self._running = self._drawn = 0
        self._reasons: list[str] = []

    def begins(self, samples: int) -> None:
        """Count samples that are being drawn."""
        self._running += samples
        self._drawn += samples

    def ends(self, samples: int) -> None:
        """Count samples that are finished, with any outcome."""
        self._running -= samples

    def count(self, failure: Failure) -> None:
        """Count one failure. Raises `RewardError` with the first reasons once there are too many."""
        self._reasons.append(failure.reason)
        samples = max(self._batch, self._drawn)
        if len(self._reasons) > max(self._least, self._max_share * samples):
            first = "\n".join(f"  {reason}" for reason in dict.fromkeys(self._reasons[:SHOWN]))
            raise RewardError(
                f"environments failed {len(self._reasons)} times among {samples} samples, retries included, more often "
                f"than max_failed_share = {self._max_share:g} of environment.skyrl_gym allows:\n{first}"
            )

    def reset(self) -> None:
        """Start counting for the next batch, of which some samples are being drawn already."""
        self._reasons.clear()
        self._drawn = self._running


class Attempts:
    """Draws samples, and draws them again if environments fail, as `environment.skyrl_gym` configures."""

    def __init__(self, gym: SkyRLGymConfig, tally: FailureTally, first_turns: FirstTurns) -> None:
        """`first_turns` asks the engine for the first completion of episodes that have begun."""
        self._tally, self._first_turns = tally, first_turns
        self._attempts, self._retried = gym.max_attempts, frozenset(gym.retried_failures)
        self._seconds = gym.trajectory_timeout_seconds

    async def sample(self, episode: Episode, first_outcome: FirstOutcome, completion: Completion | None) -> Trajectory:
        """Draw one trajectory. A sample whose environment fails is drawn again, with other random numbers, while there
        is time.
        """
        return await self._until_judged(
            episode, lambda episode, until: self._play(episode, first_outcome, completion, until), self._play_again
        )

    async def run_agent(self, episode: AgentEpisode) -> Trajectory:
        """Draw one trajectory that an agent plays; otherwise like `sample`."""
        return await self._until_judged(episode, self._run, self._run)

    async def _until_judged(self, episode: E, first: Play[E], retry: Play[E]) -> Trajectory:
        failures: list[Failure] = []
        until = self._deadline()
        attempt = outcome_of(first(episode, until))
        while True:
            outcome = await attempt
            match outcome:
                case Trajectory():
                    return evolve(outcome, failures=(*failures, *outcome.failures)) if failures else outcome
                case Skipped():
                    return episode.skipped(outcome, tuple(failures))
            failures.append(outcome)
            self._tally.count(outcome)
            late = until is not None and _now() >= until
            if late or len(failures) >= self._attempts or outcome.kind not in self._retried:
                return episode.failed(tuple(failures))
            episode = episode.retry(attempt=episode.key.attempt + _RETRY)
            attempt = outcome_of(retry(episode, until))

    async def _run(self, episode: AgentEpisode, until: float | None) -> Trajectory:
        return await self._closing(episode, until, self._run_with_deadline(episode, episode.run(), until))

    async def closed(self, episode: Episode, until: float | None = None) -> Failure | Skipped | None:
        """Close the episode's environment, which may outlast the sample's time by `CLOSING_SECONDS`. Returns what went
        wrong, or None.
        """
        if not episode.is_open:
            return None
        until = self._deadline() if until is None else until
        at = None if until is None else max(until, _now()) + CLOSING_SECONDS
        return await outcome_of(self._run_with_deadline(episode, episode.close(), at))

    async def _play_again(self, episode: Episode, until: float | None) -> Trajectory:
        """Play an episode from its start, within what is left of the sample's time."""

        async def first_turn() -> tuple[FirstOutcome, Completion | None]:
            outcome = await outcome_of(episode.begin())
            (completion,) = await self._first_turns([episode], [outcome])
            return outcome, completion

        try:
            first_outcome, completion = await self._run_with_deadline(episode, first_turn(), until)
        except BaseException:
            await self.closed(episode, until)
            raise
        return await self._play(episode, first_outcome, completion, until)

    async def _play(
        self, episode: Episode, first_outcome: FirstOutcome, completion: Completion | None, until: float | None
    ) -> Trajectory:
        """Play an episode to its end, in time, and close it."""

        async def play() -> Trajectory:
            if not isinstance(first_outcome, GenerationRequest):
                raise EpisodeError(first_outcome)
            if completion is None:
                return episode.unplayed()
            return await self._run_with_deadline(episode, episode.play(completion), until)

        return await self._closing(episode, until, play())

    async def _closing(
        self, episode: Episode, until: float | None, play: Coroutine[Any, Any, Trajectory]
    ) -> Trajectory:
        """Await the trajectory of an episode, and close the episode afterwards."""
        try:
            trajectory = await play
        finally:
            wrong = await self.closed(episode, until)
        if wrong is None:
            return trajectory
        failure = Failure(kind="close", reason=wrong.reason)
        self._tally.count(failure)
        return evolve(trajectory, failures=(failure,))  # it was judged, and keeps its reward

    async def _run_with_deadline(self, episode: Episode, work: Coroutine[Any, Any, T], until: float | None) -> T:
        if until is None:
            return await work
        try:
            async with asyncio.timeout_at(until) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise  # of another timeout
            field = "environment.skyrl_gym.trajectory_timeout_seconds"
            raise EpisodeError(
                Failure(kind="timeout", reason=f"{episode.name} did not finish within {self._seconds:g} s ({field})")
            ) from None

    def _deadline(self) -> float | None:
        return None if self._seconds is None else _now() + self._seconds


async def outcome_of(work: Coroutine[Any, Any, T]) -> T | Failure | Skipped:
    """The awaited result, or the reason why the environment gave none."""
    try:
        return await work
    except EpisodeError as error:
        return error.outcome


def _now() -> float:
    return asyncio.get_running_loop().time()
