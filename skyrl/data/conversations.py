"""Conversations in the forms of dataset rows: OpenAI's messages, ShareGPT's turns, the JSON text of either, lists of
text parts.

Every form becomes messages with `role` and `content`. Nulls are dropped, in rows of a table at any depth, because a
table uses null both for absent values and for values that are null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.chats.contents import has_call_list, short, split_thoughts
from skyrl.chats.text import Message
from skyrl.data.sources import Row, is_table
from skyrl.errors import DataError

SHAREGPT_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""Role of each speaker of ShareGPT's turns, {"from": ..., "value": ...}."""

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Names of columns, and types of message parts, that are not text."""


def messages_of(messages: object, key: str) -> list[Message]:
    """The messages of one column. Raises `DataError` if it is not a conversation, or not all text."""
    messages = from_json(messages, key) if isinstance(messages, str) and messages.lstrip().startswith("[") else messages
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(
            f"{key} is {short(messages)}, not a list of messages such as {{'role': 'user', 'content': ...}}"
        )
    return [_message(value, key) for value in messages]


def tools_of(tools: Any, key: str) -> Sequence[Any] | None:
    """The tools of one column, a list or its JSON text; None if there are none. Raises `DataError`."""
    tools = from_json(tools, key) if isinstance(tools, str) and tools else tools
    if tools and not isinstance(tools, Sequence):
        raise DataError(f"{key} is {short(tools)}, not a list of tools")
    return tools or None


def with_system(messages: list[Message], system: object) -> list[Message]:
    """The conversation, preceded by the system message of a separate column unless it already has one."""
    if isinstance(system, str) and system and messages[0].get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def refuse_media(row: Row) -> None:
    """Raises `DataError` for a row with images, video or audio: only its text would be trained on."""
    for name in MEDIA:
        if row.get(name):
            raise DataError(f"it has {name}, and this version trains on text alone: leave such rows or the column out")


def without_nulls(value: object) -> Any:
    """A copy without keys whose value is null, at any depth."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def without_inner_nulls(row: Row, source: str) -> Row:
    """The row of a source. In a table, the values of its columns have no nulls inside: they fill up what other rows
    have. A column itself stays null, as in JSON: readers tell that from a column that is not there.
    """
    return {name: without_nulls(value) for name, value in row.items()} if is_table(source) else row


def from_json(text: str, key: str) -> Any:
    """The text of a column, parsed as JSON. Raises `DataError`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{key} is not JSON: {error}") from None


def _message(turn: object, key: str) -> Message:
    if isinstance(turn, Mapping) and "role" not in turn and isinstance(turn.get("from"), str):
        turn = _sharegpt_message(turn, key)
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise DataError(f"the message {short(turn)} in {key} has no role")
    message = {name: value for name, value in turn.items() if value is not None}
    if isinstance(message.get("content"), list | tuple):
        message["content"] = "".join(_text_of(part, key) for part in message["content"])
    says_otherwise = message.get("tool_calls") or split_thoughts({**message, "content": ""})[0]
    if not isinstance(message.get("content", "" if says_otherwise else None), str):
        raise DataError(f"the message {short(turn)} in {key} has no text as its content")
    if not has_call_list(message):
        raise DataError(f"the message {short(turn)} in {key} has tool_calls that are not a list of tables")
    return message


def _text_of(part: object, key: str) -> str:
    """The text of one part of a list-valued content."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    text = part.get("text") if isinstance(part, Mapping) else part
    if kind != "text" or not isinstance(text, str):
        raise DataError(f"a message in {key} has a part of type {kind!r}, and this version trains on text alone")
    return text


def _sharegpt_message(turn: Mapping[str, Any], key: str) -> Message:
    role = SHAREGPT_ROLES.get(turn["from"])
    if role is None:
        raise DataError(f"a turn in {key} is from {turn['from']!r}; known: {', '.join(SHAREGPT_ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if turn["from"] == "function_call":
        calls = from_json(str(turn.get("value")), key)
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls], **rest}
    return {"role": role, "content": turn.get("value"), **rest}
