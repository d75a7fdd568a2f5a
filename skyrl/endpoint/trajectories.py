"""Trajectories that agents are playing: each has a key that assigns requests to it.

Responses that requests may continue are stored for each trajectory, and for all clients together.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from attrs import Factory, define, evolve

from skyrl.config import SamplingParams
from skyrl.endpoint.conversations import Conversations, History
from skyrl.endpoint.reply import Json
from skyrl.errors import RequestError
from skyrl.inference.engine import SampleKey

PREFIX = "skyrl-trajectory-"
"""Prefix of every trajectory's key, so that the key of a trajectory that has ended is not mistaken for a client's
key."""

MOST_AT_ONCE = 64
"""Largest number of answers of one trajectory that are sampled at the same time."""

STORED_CHARACTERS = 64 << 20
"""Largest total number of characters of stored conversations; beyond it the oldest are dropped."""


class StoredResponses:
    """Stored responses by their id, each with the conversation that it ends. The oldest are dropped when full."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[History, Json, int]] = OrderedDict()
        self._size = 0

    def keep(self, response: Json, history: History) -> None:
        """Store a response and its conversation; each counts in full, even if it shares messages with others."""
        size = len(json.dumps(response)) + sum(len(json.dumps(message)) for message in history.messages)
        self._kept[response["id"]] = history, response, size
        self._size += size
        while self._size > STORED_CHARACTERS:
            _, (*_, dropped) = self._kept.popitem(last=False)
            self._size -= dropped

    def history(self, number: str) -> History:
        """The conversation that ends with a response. Raises `RequestError` if it is not stored."""
        if number not in self._kept:
            raise RequestError(
                f"{_missing_response(number)}; send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._kept[number][0]

    def response(self, number: str) -> Json:
        """A response, as it was answered. Raises `RequestError` if it is not stored."""
        if number not in self._kept:
            raise RequestError(_missing_response(number), status=404)
        return self._kept[number][1]


def _missing_response(number: str) -> str:
    return f"there is no response {number[:80]!r} here: it was not stored, or newer ones have replaced it"


@define(eq=False)
class PlayedTrajectory:
    """One trajectory while its agent runs."""

    sample: SampleKey
    """The trajectory's sample in its group; every answer uses separate random numbers."""

    sampling: SamplingParams
    """Sampling settings of its answers, which take precedence over those of requests."""

    most_requests: int
    """Largest number of requests that it may make."""

    key: str = Factory(lambda: PREFIX + secrets.token_urlsafe(24))
    conversations: Conversations = Factory(Conversations)
    stored: StoredResponses = Factory(StoredResponses)
    overruled: Counter[str] = Factory(Counter)
    """For each sampling setting, how often a request asked for another value than the run's."""

    cut_off: bool = False
    """Whether a request was refused because the conversation or the number of requests reached its limit."""

    requests: int = 0
    sampling_now: int = 0
    _asked: Counter[bytes] = Factory(Counter)

    def begin(self, samples: int) -> None:
        """Count a request. Raises `RequestError` beyond the trajectory's limits."""
        if self.requests >= self.most_requests:
            self.cut_off = True
            raise RequestError(
                f"this trajectory has used all of its {self.most_requests} requests (environment.agent.max_requests)",
                status=403,
                code="too_many_requests",
            )
        if samples > MOST_AT_ONCE:
            raise RequestError(f"{samples} answers at once: a trajectory may sample at most {MOST_AT_ONCE}", param="n")
        if self.sampling_now + samples > MOST_AT_ONCE:
            raise RequestError(f"this trajectory may sample at most {MOST_AT_ONCE} answers at once", status=429)
        self.requests += 1

    def keys(self, prompt_ids: tuple[int, ...], count: int) -> tuple[SampleKey, ...]:
        """A key for each answer to a prompt. It depends only on the prompt and on how often that was sent before, so
        concurrent requests draw the same numbers in any order.
        """
        digest = blake2b(",".join(map(str, prompt_ids)).encode(), digest_size=6).digest()
        first = self._asked[digest]
        self._asked[digest] += count
        number = int.from_bytes(digest, "little") | 1  # 0 means a first turn
        return tuple(evolve(self.sample, turn=number + 2 * 2**48 * index) for index in range(first, first + count))


class Trajectories:
    """The running trajectories, by key."""

    def __init__(self) -> None:
        self._played: dict[str, PlayedTrajectory] = {}

    @contextmanager
    def playing(self, trajectory: PlayedTrajectory) -> Iterator[PlayedTrajectory]:
        """Context in which requests with the trajectory's key are answered; afterwards they are refused."""
        self._played[trajectory.key] = trajectory
        try:
            yield trajectory
        finally:
            del self._played[trajectory.key]

    def of(self, key: str | None) -> PlayedTrajectory | None:
        """The trajectory of a key; None if the key is not a trajectory's. Raises `RequestError` if the trajectory has
        ended.
        """
        if key is None or not key.startswith(PREFIX):
            return None
        trajectory = self._played.get(key)
        if trajectory is None:
            raise RequestError("the trajectory of this key is over", status=401, code="trajectory_over")
        return trajectory
