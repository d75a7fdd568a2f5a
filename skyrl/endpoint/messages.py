"""Messages and tools of a request, in the form that chat templates expect, and answers as messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from skyrl.chats.tool_calls import CLOSING, OPENING, Call, hermes
from skyrl.endpoint.conversations import Message
from skyrl.errors import RequestError
from skyrl.inference.engine import Completion

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning")


def messages_of(given: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Chat messages in OpenAI's form. Raises `RequestError`."""
    if not given:
        raise RequestError("messages has to hold a message", param="messages")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(given))


def _message(given: Mapping[str, Any], where: str) -> Message:
    role = given.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role has to be one of {', '.join(ROLES)}", param=where)
    message = {"role": "system" if role == "developer" else role, "content": text_of(given.get("content"), where)}
    for name in _KEPT:
        if isinstance(given.get(name), str):
            message[name] = given[name]
    if calls := given.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls has to be a list, in a message of the assistant", param=where)
        message["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in calls]
    return message


def text_of(content: object, where: str) -> str:
    """Content as text: a string, or a list of parts of text. Raises `RequestError` for images and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content has to be text or parts of text", param=where)
        texts.append(part["text"])
    return "".join(texts)


def _call(given: object, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has to hold functions with a name and arguments", param=where)
    assert isinstance(given, Mapping)
    return call_message(str(given.get("id", "")), function["name"], function.get("arguments") or {})


def call_message(number: str, name: str, arguments: object) -> dict[str, Any]:
    """A tool call in the form that chat templates expect: arguments as an object if they are a JSON object."""
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = arguments
        arguments = read if isinstance(read, dict) else arguments
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def tools_of(given: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Tools in OpenAI's form. Raises `RequestError`."""
    for tool in given:
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise RequestError("tools has to hold functions", param="tools")
        if not isinstance(function.get("name"), str):
            raise RequestError("a function of tools has no name", param="tools")
    return tuple(given)


@frozen
class SampledMessage:
    """A sampled answer as a message."""

    completion: Completion
    text: str
    """Content without calls and without the stop text."""

    calls: tuple[tuple[str, Call], ...]
    """Calls of tools, with an id for each."""

    @property
    def message(self) -> Message:
        """The message that represents the answer in a later request."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            made["tool_calls"] = [call_message(number, call.name, dict(call.arguments)) for number, call in self.calls]
        return made


def answer_of(completion: Completion, stop: str | None, *, tools: bool) -> SampledMessage:
    """Parse an answer. The stop text that ended it, if one did, is removed from the text, but stays in the token ids.
    If any call cannot be parsed, all calls stay in the text.
    """
    text = completion.text.removesuffix(stop or "")
    found = hermes(text) if tools else ()
    readable = tuple(call for call in found if not call.unreadable)
    if readable and len(readable) == len(found):
        text = (text.partition(OPENING)[0].rstrip() + text.rpartition(CLOSING)[2]).rstrip()
    else:
        readable = ()
    return SampledMessage(completion, text, tuple((f"call_{secrets.token_hex(8)}", call) for call in readable))
