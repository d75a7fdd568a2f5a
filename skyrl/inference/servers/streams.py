"""Streamed answers of inference servers: tokens are reported as they arrive, and the whole is read like any answer.

Connection.hear --event--> VLLM's: parts, joined | SGLang's: each holds all so far --tokens--> on_tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.inference.engine import NewTokens
from skyrl.inference.servers.answers import RequestedSample, ids, mapping, refuse_unknown_tokens
from skyrl.processes.answers import BadAnswer


class Streamed(ABC):
    """A streamed answer, whose tokens are reported as they arrive."""

    def __init__(self, requested: RequestedSample) -> None:
        self.answer: dict[str, Any] = {}
        """The answer so far, in the form of one that is not streamed."""
        self._requested, self._count = requested, 0

    @abstractmethod
    def add(self, event: object) -> None:
        """Take the next event. Raises `BadAnswer`."""

    def _report(self, new: Sequence[int]) -> None:
        """Report new tokens. Raises `BadAnswer` for tokens that the model does not have, and for more than `limit`."""
        requested, listen = self._requested, self._requested.request.on_tokens
        refuse_unknown_tokens(new, requested.vocabulary)
        if self._count + len(new) > requested.limit:
            raise BadAnswer(f"with more tokens than the {requested.limit} that were asked for")
        if new and listen is not None:
            listen(NewTokens(index=requested.index, start=self._count, token_ids=tuple(new)))
        self._count += len(new)


class Parts(Streamed):
    """An answer in parts, as vLLM streams it: lists are continued, and other values replace earlier ones."""

    def add(self, event: object) -> None:
        fields = dict(mapping(event, "a part of an answer"))
        choices = fields.pop("choices", None)
        if not isinstance(choices, list) or len(choices) > 1:
            raise BadAnswer("with a part that does not have exactly one choice")
        _continue(self.answer, fields)
        for choice in choices:  # a part with token counts has none
            part = mapping(choice, "a choice")
            self._report(ids(part.get("token_ids") or []))
            _continue(self.answer.setdefault("choices", [{}])[0], part)


class Growing(Streamed):
    """An answer of SGLang, which repeats all of it so far in every event."""

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
        self._report(so_far[self._count :])


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
