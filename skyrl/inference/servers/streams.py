"""Streamed answers of inference servers: tokens are reported as they arrive, and the whole is read like any answer.

Connection.hear --event--> VLLM's: parts, joined | SGLang's: each holds all so far --tokens--> on_tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from skyrl.inference.engine import NewTokens
from skyrl.inference.servers.answers import RequestedSample, ids, mapping
from skyrl.inference.servers.http_connection import Connection, Listener
from skyrl.processes.answers import BadAnswer


class Streamed(Protocol):
    """A streamed answer."""

    answer: dict[str, Any]
    """The answer so far, in the form of one that is not streamed."""

    def add(self, event: object) -> None:
        """Take the next event. Raises `BadAnswer`."""


async def fetch_sample(
    connection: Connection,
    path: str,
    body: Mapping[str, object],
    requested: RequestedSample,
    session: str,
    kind: Callable[[RequestedSample], Streamed],
    *,
    seconds: float,
) -> object:
    """The answer to a request for one sample; streamed if it has an `on_tokens` callback. Raises `BadAnswer`."""
    headers = {"X-Session-ID": session}
    if requested.request.on_tokens is None:
        return await connection.post(path, body, seconds=seconds, headers=headers)
    attempts: list[Streamed] = []

    def begin() -> Listener:
        attempts.append(kind(requested))
        return attempts[-1].add

    await connection.hear(path, {**body, "stream": True}, seconds=seconds, headers=headers, begin=begin)
    return attempts[-1].answer


class _Reported:
    """Reports the tokens of one sample."""

    def __init__(self, requested: RequestedSample) -> None:
        self._requested, self.count = requested, 0

    def report(self, new: Sequence[int]) -> None:
        """Report new tokens. Raises `BadAnswer` for tokens that the model does not have, and for more than `limit`."""
        requested, listen = self._requested, self._requested.request.on_tokens
        strange = [token for token in new if not 0 <= token < requested.vocabulary]
        if strange:
            raise BadAnswer(f"with token {strange[0]}, outside the vocabulary of {requested.vocabulary} tokens")
        if self.count + len(new) > requested.limit:
            raise BadAnswer(f"with more tokens than the {requested.limit} that were asked for")
        if new and listen is not None:
            listen(NewTokens(index=requested.index, start=self.count, token_ids=tuple(new)))
        self.count += len(new)


class Parts:
    """An answer in parts, as vLLM streams it: lists are continued, and other values replace earlier ones."""

    def __init__(self, requested: RequestedSample) -> None:
        self.answer: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._reported = _Reported(requested)

    def add(self, event: object) -> None:
        fields = dict(mapping(event, "a part of an answer"))
        choices = fields.pop("choices", None)
        if not isinstance(choices, list) or len(choices) > 1:
            raise BadAnswer("with a part that does not have exactly one choice")
        _continue(self.answer, fields)
        for choice in choices:  # a part with token counts has none
            part = mapping(choice, "a choice")
            self._reported.report(ids(part.get("token_ids") or []))
            _continue(self._choice, part)
            self.answer["choices"] = [self._choice]


class Growing:
    """An answer of SGLang, which repeats all of it so far in every event."""

    def __init__(self, requested: RequestedSample) -> None:
        self.answer: dict[str, Any] = {}
        self._reported = _Reported(requested)

    def add(self, event: object) -> None:
        self.answer = dict(mapping(event, "a part of an answer"))
        if self.answer.get("output_ids") is None:
            return  # an older server reports its tokens only with their log-probabilities
        so_far = ids(self.answer["output_ids"])
        counted = mapping(self.answer.get("meta_info"), "meta_info").get("completion_tokens")
        if counted is not None and counted != len(so_far):
            raise BadAnswer(
                f"with {len(so_far)} tokens of {counted}: a server started with --stream-output is not supported"
            )
        self._reported.report(so_far[self._reported.count :])


def _continue(answer: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part to the answer before it."""
    for name, value in part.items():
        before = answer.get(name)
        if isinstance(value, Mapping):
            answer[name] = into = before if isinstance(before, dict) else {}
            _continue(into, value)
        elif isinstance(value, list):
            answer[name] = [*(before if isinstance(before, list) else ()), *value]
        elif value is not None or name not in answer:
            answer[name] = value
