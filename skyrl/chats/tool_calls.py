"""Calls of tools, as models write them.

    parser(answer) -> calls in order, each readable or with the reason why not

`hermes` is the form of Hermes 2 Pro, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
Other models write other forms; a parser is a function from a text to `Call`s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from attrs import field, frozen

OPENING, CLOSING = "<tool_call>", "</tool_call>"
THOUGHT, THOUGHT_ENDS = "<think>", "</think>"


@frozen(kw_only=True)
class Call:
    """One call, such as `Call(name="add", arguments={"a": 1, "b": 2})`; with `unreadable`, none that can be made."""

    name: str = ""
    arguments: Mapping[str, Any] = field(factory=dict)
    unreadable: str = ""
    """Reason why the call cannot be read, in a sentence for the model."""


CallParser = Callable[[str], tuple[Call, ...]]
"""An answer, without special tokens -> its calls; none: the answer is final. Raises nothing, whatever is written."""


def hermes(answer: str) -> tuple[Call, ...]:
    """Every `<tool_call>` after the thoughts. A last one that is not closed counts if it can be read: a stop text may
    have taken its end. Takes time linear in the answer.
    """
    return tuple(_call(each.partition(CLOSING)[0]) for each in _said(answer).split(OPENING)[1:])


def _said(answer: str) -> str:
    """The answer without the thoughts that it begins with. Those without an end are all there is."""
    _, ends, said = answer.partition(THOUGHT_ENDS)
    if ends:
        return said
    return "" if answer.lstrip().startswith(THOUGHT) else answer


def _call(text: str) -> Call:
    try:
        given = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return Call(unreadable=f"the call is not JSON: {error}")
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str):
        return Call(unreadable='a call is an object such as {"name": "...", "arguments": {...}}')
    arguments = given.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(unreadable=f"the arguments of {name} have to be an object")
    return Call(name=name, arguments=arguments)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
