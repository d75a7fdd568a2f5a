"""Reads values from the row of a prompt, and marked parts from a text; makes texts acceptable to a tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeVar

from skyrl.data.sources import is_null
from skyrl.errors import TaskError

T = TypeVar("T")

_UNCHANGING = frozenset({bool, bytes, float, int, str, type(None)})


def copied(value: T) -> T:
    """A deep copy. Plain data, of which rows consist, takes a fifth of `deepcopy`'s time, which every sample of a batch
    spends.
    """
    plain: Any = value
    kind: Any = type(value)
    if kind is dict:
        plain = {name: copied(item) for name, item in plain.items()}
    elif kind is list or kind is tuple:
        plain = kind(map(copied, plain))
    elif kind not in _UNCHANGING:
        plain = deepcopy(plain)
    return plain  # type: ignore[no-any-return]  # of the type that was copied


def ground_truths(extras: Mapping[str, Any]) -> dict[str, Any]:
    """The ground truths of a row by their places: `reward_spec`, `reward_model` (verl) and the column `ground_truth`.
    Null and NaN are none.
    """
    truths: dict[str, Any] = {}
    for column in ("reward_spec", "reward_model"):
        spec = extras.get(column)
        if isinstance(spec, Mapping):
            truths[f"{column}.ground_truth"] = spec.get("ground_truth")
    truths["ground_truth"] = extras.get("ground_truth")
    return {path: truth for path, truth in truths.items() if not is_null(truth)}


def differing(truths: Mapping[str, Any]) -> str | None:
    """Reason why a row with these ground truths is bad: two of them differ. Numbers equal their text."""
    (path, first), *others = truths.items() or [("", None)]
    for other, truth in others:
        if truth != first and str(truth).strip() != str(first).strip():
            return f"has two ground truths: {path} = {first!r:.60} and {other} = {truth!r:.60}"
    return None


def ground_truth(extras: Mapping[str, Any], env: str, kind: type | tuple[type, ...] = str) -> Any:
    """The first ground truth of a row that is an instance of `kind`. Raises `TaskError` if there is none."""
    for truth in ground_truths(extras).values():
        if isinstance(truth, kind):
            return truth
    kinds = kind if isinstance(kind, tuple) else (kind,)
    named = " or ".join({"str": "text", "dict": "table"}.get(item.__name__, item.__name__) for item in kinds)
    raise TaskError(f"{env} needs the column reward_spec with a {named} under ground_truth in every row")


def max_turns(extras: Mapping[str, Any], default: int) -> int:
    """`max_turns` of the row, or of its `extra_info`. Raises `TaskError` unless it is a positive whole number."""
    result = _turns_of_row(extras) or default
    if not isinstance(result, int) or result < 1:
        raise TaskError(f"the row's max_turns is {result!r}, not a positive whole number")
    return result


def capped_max_turns(extras: Mapping[str, Any], limit: int) -> Any:
    """The row's `max_turns`, but at most `limit`, since a later turn would never be rewarded. Without one: `limit`."""
    row_limit = _turns_of_row(extras) or limit
    return min(row_limit, limit) if isinstance(row_limit, int) else row_limit


def _turns_of_row(extras: Mapping[str, Any]) -> Any:
    info = extras.get("extra_info")
    return extras.get("max_turns") or (info.get("max_turns") if isinstance(info, Mapping) else None)


def between(text: str, opening: str, closing: str) -> Iterator[str]:
    """Texts between each opening mark and the first closing one after it, from left to right.

    Takes time linear in the text, whatever its content.
    """
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        yield text[start + len(opening) : end]
        position = end + len(closing)


def first_between(text: str, opening: str, closing: str) -> str | None:
    """The first of `between`, or None."""
    return next(between(text, opening, closing), None)


def last_between(text: str, opening: str, closing: str) -> str | None:
    """The last of `between`, or None."""
    last = deque(between(text, opening, closing), maxlen=1)
    return last[0] if last else None


def tokenizable(text: str) -> str:
    """The text with U+FFFD in place of each lone surrogate, which JSON can spell and UTF-8 cannot hold.

    Two surrogates that make up a character become that character.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
