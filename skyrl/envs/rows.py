"""Reads values from the row of a prompt, and marked parts from a text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl.errors import TaskError


def ground_truth(extras: Mapping[str, Any], env: str, kind: type | tuple[type, ...] = str) -> Any:
    """`ground_truth` of the column `reward_spec` or `reward_model`. Raises `TaskError` if it is not an instance of
    `kind`.
    """
    for column in ("reward_spec", "reward_model"):
        spec = extras.get(column)
        if isinstance(spec, Mapping) and isinstance(spec.get("ground_truth"), kind):
            return spec["ground_truth"]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    named = " or ".join({"str": "text", "dict": "table"}.get(each.__name__, each.__name__) for each in kinds)
    raise TaskError(f"{env} needs the column reward_spec with a {named} under ground_truth in every row")


def max_turns(extras: Mapping[str, Any], default: int) -> int:
    """`max_turns` of the row, or of its `extra_info`. Raises `TaskError` unless it is a positive whole number."""
    info = extras.get("extra_info")
    found = extras.get("max_turns") or (info.get("max_turns") if isinstance(info, Mapping) else None) or default
    if not isinstance(found, int) or found < 1:
        raise TaskError(f"the row's max_turns is {found!r}, not a positive whole number")
    return found


def fewest_turns(extras: Mapping[str, Any], most: int) -> Any:
    """The row's `max_turns`, at most `most`, which is also the default: a turn after `most` would never be rewarded."""
    info = extras.get("extra_info")
    own = extras.get("max_turns") or (info.get("max_turns") if isinstance(info, Mapping) else None) or most
    return min(own, most) if isinstance(own, int) else own


def between(text: str, opening: str, closing: str) -> Iterator[str]:
    """Texts between each opening mark and the first closing one after it, from left to right.

    Takes time linear in the text, whatever its content.
    """
    place = 0
    while (start := text.find(opening, place)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        yield text[start + len(opening) : end]
        place = end + len(closing)


def first_between(text: str, opening: str, closing: str) -> str | None:
    """The first of `between`, or None."""
    return next(between(text, opening, closing), None)


def last_between(text: str, opening: str, closing: str) -> str | None:
    """The last of `between`, or None."""
    last = deque(between(text, opening, closing), maxlen=1)
    return last[0] if last else None
