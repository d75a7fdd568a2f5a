"""The parts of a message, and whether a text contains them: a chat template may drop thoughts, calls or results.

A part counts as contained if its text occurs verbatim, without surrounding white space, or in its JSON spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from skyrl.chats.text import Message

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry thoughts outside of `content`; templates read one of them or none."""

_INLINE = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>(.*)", re.DOTALL)
"""Thoughts at the beginning of a content; if the header opens them, the text has only the closing tag."""


def split_thoughts(message: Message) -> tuple[str, str]:
    """Thoughts of an assistant's message and the rest of its content; ("", content) if it has none."""
    content = message.get("content") or ""
    for name in THOUGHT_FIELDS:
        if isinstance(message.get(name), str) and message[name]:
            return message[name], content
    inline = _INLINE.fullmatch(content) if message.get("role") == "assistant" else None
    return (inline[1].strip("\n"), inline[2].lstrip("\n")) if inline else ("", content)


def calls_of(message: Message) -> Iterator[Mapping[str, Any]]:
    """Name and arguments of each tool call, whether they are nested in `function` or not."""
    for call in message.get("tool_calls") or ():
        yield call["function"] if isinstance(call.get("function"), Mapping) else call


def dropped(message: Message, text: str, *, thoughts: bool = True) -> list[str]:
    """Descriptions of the parts of a message that are missing in `text`; `thoughts=False` ignores thoughts."""
    thought, rest = split_thoughts(message)
    parts = [("the thoughts", thought)] if thoughts else []
    parts.append((f"the content of a message of {message.get('role')}", rest))
    missing = [f"{what} ({_short(said)})" for what, said in parts if not holds(text, said)]
    for call in calls_of(message):
        name = str(call.get("name", ""))
        if not holds(text, name):
            missing.append(f"the call of {name}")
        elif not _holds_arguments(text, call.get("arguments")):
            missing.append(f"the arguments of the call of {name} ({_short(call.get('arguments'))})")
    return missing


def dropped_tools(tools: Sequence[Any], text: str) -> list[str]:
    """Descriptions of the tools whose names are missing in `text`."""
    entries = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    names = [str(entry["name"]) for entry in entries if isinstance(entry, Mapping) and entry.get("name")]
    return [f"the tool {name}" for name in names if name not in text]


def holds(text: str, said: str) -> bool:
    """Whether `text` contains the words verbatim or in their JSON spelling."""
    said = said.strip()
    return said in text or any(json.dumps(said, ensure_ascii=plain)[1:-1] in text for plain in (False, True))


def _holds_arguments(text: str, written: object) -> bool:
    given = written
    if isinstance(written, str):
        try:
            given = json.loads(written)
        except ValueError:
            return holds(text, written)
    if _as_json(text, given):
        return True
    if isinstance(given, Mapping | list) and given and repr(given) in text:
        return False  # in Python's notation: the template expects a text
    return all(holds(text, leaf) for leaf in _leaves(given))


def _as_json(text: str, value: object) -> bool:
    forms = product(((", ", ": "), (",", ":")), (False, True))
    return any(json.dumps(value, separators=between, ensure_ascii=plain) in text for between, plain in forms)


def _leaves(value: object) -> Iterator[str]:
    """All keys and values at any depth, as text."""
    match value:
        case Mapping():
            for key, inner in value.items():
                yield str(key)
                yield from _leaves(inner)
        case list() | tuple():
            for inner in value:
                yield from _leaves(inner)
        case str():
            yield value
        case bool() | None:
            pass  # templates write them as true, True, null, None or nothing
        case _:
            yield json.dumps(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
