"""Patterns of the shell (`*.sh`, `[a-c]?`) as regular expressions, and expansion of braces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from skyrl.interop.shell.syntax import closing, unquoted

_SEQUENCE = re.compile(r"(-?\d{1,6})\.\.(-?\d{1,6})(?:\.\.(-?\d{1,6}))?|([A-Za-z])\.\.([A-Za-z])")
_CLASS = re.compile(r"\[[!^]?\]?(?:\[:\w+:\]|[^\]])*\]")
_NAMED = {"alnum": "A-Za-z0-9", "alpha": "A-Za-z", "digit": "0-9", "lower": "a-z", "upper": "A-Z", "space": r"\s"}
_MOST = 10_000


def regular(pattern: str, *, greedy: bool = True) -> str:
    """The regular expression of a pattern in which quoted characters are escaped. Raises ValueError for extended ones
    such as `@(a|b)`.
    """
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        letter = pattern[position]
        group = _CLASS.match(pattern, position)
        if letter in "?*+@!" and pattern[position + 1 : position + 2] == "(":
            raise ValueError(f"the pattern {pattern}")
        if letter == "\\":
            position += 1
            parts.append(re.escape(pattern[position : position + 1] or "\\"))
        elif letter == "*":
            parts.append(".*" if greedy else ".*?")
        elif letter == "?":
            parts.append(".")
        elif group:
            inside = re.sub(r"\[:(\w+):\]", lambda match: _NAMED.get(match[1], ""), group[0][1:-1])
            parts.append("[" + re.sub(r"^[!^]", "^", inside).replace("[", r"\[") + "]")
            position = group.end() - 1
        else:
            parts.append(re.escape(letter))
        position += 1
    return "(?s:" + "".join(parts) + ")"


def escaped(text: str) -> str:
    """The pattern that matches the text itself."""
    return re.sub(r"([*?\[\]\\+@!()|])", r"\\\1", text)


def alternatives(word: str) -> Iterator[str]:
    """The words that a word with braces stands for: `a{b,c}` for ab and ac, `{1..3}` for 1, 2 and 3."""
    for start in unquoted(word, "{"):
        end = closing(word, start)
        items = _items(word[start + 1 : end - 1]) if end > 0 else []
        if items:
            for item in items:
                yield from alternatives(word[:start] + item + word[end:])
            return
    yield word


def _items(inside: str) -> list[str]:
    commas, depth = [], 0
    for at in unquoted(inside, "{},"):
        depth += {"{": 1, "}": -1, ",": 0}[inside[at]]
        commas += [at] if inside[at] == "," and not depth else []
    if commas:
        return [inside[one + 1 : other] for one, other in pairwise([-1, *commas, len(inside)])]
    match = _SEQUENCE.fullmatch(inside)
    if match is None:
        return []
    if match[4]:
        first, last = ord(match[4]), ord(match[5])
        return [chr(item) for item in range(first, last + (1 if first <= last else -1), 1 if first <= last else -1)]
    first, last = int(match[1]), int(match[2])
    step = abs(int(match[3] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [str(number) for number in numbers[:_MOST]]
