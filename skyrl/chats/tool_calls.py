"""Parses tool calls in the notation of models.

    parser(answer) -> calls in order, each parsed or with the reason why not

`hermes` is the format of Hermes 2 Pro, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
For other formats, a parser is any function from a text to `Call`s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from attrs import field, frozen

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@frozen(kw_only=True)
class Call:
    """One call, such as `Call(name="add", arguments={"a": 1, "b": 2})`; if `unreadable` is set, it cannot be made."""

    name: str = ""
    arguments: Mapping[str, Any] = field(factory=dict)
    unreadable: str = ""
    """Reason why the call cannot be parsed, as a sentence for the model."""


CallParser = Callable[[str], tuple[Call, ...]]
"""Function from an answer, without special tokens, to its calls; without calls, the answer is final. Never raises."""


def hermes(answer: str) -> tuple[Call, ...]:
    """Every `<tool_call>` after the thoughts. A last one without a closing tag counts if it can be parsed, because a
    stop text may have removed the tag. Takes time linear in the answer.
    """
    _, ends, rest = answer.partition("</think>")
    if not ends:
        rest = "" if answer.lstrip().startswith("<think>") else answer  # thoughts that do not end are all
    return tuple(_call(item.partition(CLOSING)[0]) for item in rest.split(OPENING)[1:])


def _call(text: str) -> Call:
    try:
        call = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return Call(unreadable=f"the call is not JSON: {error}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return Call(unreadable='a call is an object such as {"name": "...", "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(unreadable=f"the arguments of {name} have to be an object")
    return Call(name=name, arguments=arguments)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
