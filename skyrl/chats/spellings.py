"""Equivalent spellings of a conversation, for templates that support only one of them.

Templates differ in where they look for thoughts (in `content` between <think> and </think>, or in a field), in whether
a call's arguments are an object or its text, and in the value of `content` in a message with only a call. All spellings
mean the same, so the one that the template renders in full is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Generic, Literal, TypeVar

from attrs import frozen

from skyrl.chats.contents import THOUGHT_FIELDS, DroppedPart, holds, leaves_out, split_thoughts
from skyrl.chats.text import Message
from skyrl.errors import DataError

T = TypeVar("T")

Thoughts = Literal["given", "reasoning_content", "thinking", "reasoning"]
Arguments = Literal["object", "text"]
Empty = Literal["text", "null", "absent"]


@frozen
class Spelling:
    """One way to spell a conversation."""

    thoughts: Thoughts = "given"
    """Location of thoughts: where the row has them, or the field of this name."""

    arguments: Arguments = "object"
    """Whether a call's arguments are a mapping or its JSON text."""

    empty: Empty = "text"
    """`content` of an assistant's message without content: an empty text, null, or no such key."""

    def spell(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation in this spelling."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        if message.get("role") != "assistant":
            return message
        spelled = dict(message)
        if self.thoughts != "given":
            thoughts, rest = split_thoughts(message)
            if thoughts:
                spelled = {key: value for key, value in spelled.items() if key not in THOUGHT_FIELDS}
                spelled |= {"content": rest, self.thoughts: thoughts}
        if not spelled.get("content"):
            spelled.pop("content", None)
            if self.empty != "absent":
                spelled["content"] = "" if self.empty == "text" else None
        if spelled.get("tool_calls"):
            spelled["tool_calls"] = [self._call(call) for call in spelled["tool_calls"]]
        return spelled

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"])}
        arguments = call.get("arguments")
        if self.arguments == "object" and isinstance(arguments, str):
            return {**call, "arguments": _parsed(arguments)}
        if self.arguments == "text" and isinstance(arguments, Mapping):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return call


def spellings(messages: Sequence[Message]) -> Iterator[Spelling]:
    """Spellings that differ for this conversation, the best first.

    Thoughts in `content` are first tried in a separate field: a template that reads the field renders thoughts as its
    model writes them, and any other template drops them.
    """
    answers = [message for message in messages if message.get("role") == "assistant"]
    thoughts: Sequence[Thoughts] = ("given",)
    if any(split_thoughts(message)[0] for message in answers):
        inline = not any(message.get(name) for message in answers for name in THOUGHT_FIELDS)
        fields: Sequence[Thoughts] = ("reasoning_content", "thinking", "reasoning")
        thoughts = (*fields, "given") if inline else ("given", *fields)
    calls = any(message.get("tool_calls") for message in answers)
    arguments: Sequence[Arguments] = ("object", "text") if calls else ("object",)
    empty: Sequence[Empty] = ("text",)
    if any(not split_thoughts(message)[1] for message in answers):
        empty = ("text", "null", "absent")
    yield from (Spelling(*combination) for combination in product(thoughts, arguments, empty))


class FullestSpelling(Generic[T]):
    """Finds the spelling of which a chat template drops the least. It first tries the spelling that was best for an
    earlier conversation of the kind.
    """

    def __init__(self) -> None:
        self._best: dict[tuple[Spelling, ...], Spelling] = {}  # distinct spellings -> the one that works best

    def __call__(
        self,
        chat: Sequence[Message],
        write: Callable[[Spelling], T],
        *,
        missing: Callable[[T], Iterable[DroppedPart]],
        text_of: Callable[[T], str],
        allow_dropped: bool,
    ) -> T:
        """What `write` makes of the chat in its fullest spelling; `missing` gives the parts that its text lacks.

        Thoughts of earlier messages may be missing, as usual for models; `allow_dropped` accepts that other parts are.
        Raises `DataError`, as `write` may for some spellings.
        """
        possible = tuple(spellings(chat))
        best = self._best.get(possible)
        candidates: dict[str, tuple[T, Spelling]] = {}
        refusals: list[DataError] = []
        left_out: DataError | None = None
        for spelling in dict.fromkeys((best or possible[0], *possible)):
            try:
                rendering = write(spelling)
            except DataError as error:
                refusals.append(error)
                continue
            parts = list(missing(rendering))
            if parts:
                lacks = "content"
            elif all(holds(text_of(rendering), split_thoughts(message)[0]) for message in chat):
                lacks = "nothing"
            else:
                lacks = "earlier thoughts"
            candidates.setdefault(lacks, (rendering, spelling))
            if parts:
                left_out = left_out or leaves_out(parts)
            elif lacks == "nothing" or spelling == best:
                break
        for lacks in ("nothing", "earlier thoughts", *(["content"] if allow_dropped else [])):
            if lacks in candidates:
                rendering, self._best[possible] = candidates[lacks]
                return rendering
        raise left_out or refusals[0]


def _parsed(text: str) -> object:
    """The text parsed as JSON, or the text itself if it is not JSON."""
    try:
        result = json.loads(text)
    except ValueError:
        return text
    return result if isinstance(result, Mapping) else text
