"""Items of OpenAI's Responses API as messages of a chat template, and answers as items."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.endpoint.conversations import History, Message
from skyrl.endpoint.messages import SampledMessage, call_message, text_of
from skyrl.endpoint.reply import Json
from skyrl.errors import RequestError

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


def messages_of_items(items: object) -> tuple[Message, ...]:
    """The messages of an input. A call is added to the message before it if that is the assistant's. Raises
    `RequestError`.
    """
    if isinstance(items, str):
        return ({"role": "user", "content": items},)
    if not isinstance(items, list) or not items or not all(isinstance(item, Mapping) for item in items):
        raise RequestError("input has to be a string, or a list of items that is not empty", param="input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    return tuple(messages)


def _add(messages: list[dict[str, Any]], item: Json, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("system", "developer", "user", "assistant"):
                raise RequestError(f"{where}.role has to be system, developer, user or assistant", param=where)
            role = "system" if role == "developer" else role
            messages.append({"role": role, "content": text_of(item.get("content"), where)})
        case "function_call":
            if not isinstance(item.get("name"), str):
                raise RequestError(f"{where} is a call without a name", param=where)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = call_message(str(item.get("call_id", "")), item["name"], item.get("arguments") or {})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = text_of(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text})
        case other:
            raise RequestError(
                f"{where} is of type {str(other)[:60]!r}: message, function_call and function_call_output are read",
                param=where,
                code="unsupported_value",
            )


def tools_of_items(tools: Sequence[Json]) -> tuple[Json, ...]:
    """Tools of this protocol as tools for a chat template. Raises `RequestError` for tools that OpenAI hosts."""
    for tool in tools:
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise RequestError("tools has to hold functions with a name: no other tool runs here", param="tools")
    kept = ("name", "description", "parameters")
    return tuple(
        {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}
        for tool in tools
    )


def items_of(answer: SampledMessage, number: str | None = None) -> list[dict[str, Any]]:
    """An answer as items: its calls, preceded by its text (item id `number`) if it has text or no calls."""
    part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
    status = "incomplete" if answer.completion.stop_reason == "length" else "completed"
    head = {"type": "message", "id": number or f"msg_{secrets.token_hex(12)}", "role": "assistant", "status": status}
    items: list[dict[str, Any]] = [{**head, "content": [part]}] if answer.text or not answer.calls else []
    for call_id, call in answer.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call_id, "name": call.name}
        items.append({**item, "arguments": arguments, "status": "completed"})
    return items
