"""Example chats of nine forms, to show how a chat template renders each and which tokens are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.chats.masks import ChatMasks, marked_text
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str | None, **others: object) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text, **others}


def call(number: int = 1, **arguments: object) -> dict[str, Any]:
    """A call of the tool `add`, for the `tool_calls` of a message."""
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def result(text: str) -> dict[str, Any]:
    """A message with the result of the tool."""
    return {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": text}


ADD: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}

FORMS: Mapping[str, tuple[Sequence[dict[str, Any]], Sequence[Any]]] = {
    "plain": ((user("2+2?"), assistant("Four.")), ()),
    "system": (({"role": "system", "content": "Be short."}, user("2+2?"), assistant("Four.")), ()),
    "multi-turn": ((user("2+2?"), assistant("Four."), user("Sure?"), assistant("Yes.")), ()),
    "thoughts": ((user("2+2?"), assistant("<think>\nTwo and two.\n</think>\n\nFour.")), ()),
    "tool call": ((user("2+2?"), assistant("", tool_calls=[call(a=2, b=2)])), (ADD,)),
    "tool result": (
        (user("2+2?"), assistant("", tool_calls=[call(a=2, b=2)]), result("4"), assistant("Four.")),
        (ADD,),
    ),
    "several calls": ((user("2+2, 3+3?"), assistant("", tool_calls=[call(a=2, b=2), call(2, a=3, b=3)])), (ADD,)),
    "empty content": ((user("2+2?"), assistant("")), ()),
    "unicode": ((user("é 🙂?"), assistant("ü 東京\n 🙂")), ()),
}
"""Example chats by the name of their form, each with its tools."""

SEVERAL_ANSWERS = ("multi-turn", "tool result")
"""Forms that are shown twice: with all answers learned, and with only the last one."""


def forms_page(tokenizer: ChatTokenizer) -> str:
    """All forms, one after the other: the name of each, and its text with the learned parts marked, or the reason why
    the template is refused.
    """
    every, last = (ChatMasks(tokenizer, all_messages=all_of_it) for all_of_it in (True, False))
    shown = {}
    for name, (chat, tools) in FORMS.items():
        shown[name] = _marked_or_refused(tokenizer, every, chat, tools)
        if name in SEVERAL_ANSWERS:
            shown[f"{name}, last answer alone"] = _marked_or_refused(tokenizer, last, chat, tools)
    return "\n".join(f"===== {name}\n{text.rstrip()}\n" for name, text in shown.items())


def _marked_or_refused(
    tokenizer: ChatTokenizer, masks: ChatMasks, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> str:
    try:
        return marked_text(tokenizer, *masks(chat, tools))
    except DataError as error:
        return f"refused: {error}"
