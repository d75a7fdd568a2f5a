"""Where quotes and brackets of the shell end, within one word or one expression."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

_ANSI = re.compile(r"'(?:[^'\\]|\\.)*'", re.DOTALL)
_BRACKETS = {"{": "}", "(": ")", "[": "]"}


def closing(text: str, start: int) -> int:
    """Position after the bracket that closes the one at `start`; -1 if there is none."""
    opened, closed = text[start], _BRACKETS[text[start]]
    depth = 0
    for position, letter in outside_quotes(text, start):
        depth += (letter == opened) - (letter == closed)
        if not depth:
            return position + 1
    return -1


def end_of_quote(text: str, start: int) -> int:
    """Position after the quoted text that begins at `start` with `'`, `"` or a backtick; the end of the text if it is
    not closed.
    """
    quote = text[start]
    position = start + 1
    while position < len(text):
        letter = text[position]
        if letter == quote:
            return position + 1
        if letter == "\\" and quote != "'":
            position += 2
        elif quote == '"' and letter == "$" and text[position + 1 : position + 2] in ("{", "("):
            end = closing(text, position + 1)
            position = end if end > 0 else len(text)
        elif quote == '"' and letter == "`":
            position = end_of_quote(text, position)
        else:
            position += 1
    return len(text)


def end_of_ansi(text: str, start: int) -> int:
    """Position after the text of `$'...'`, whose first quote is at `start`."""
    match = _ANSI.match(text, start)
    return match.end() if match else len(text)


def outside_quotes(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Position and character of everything that is neither quoted nor escaped."""
    position = start
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            position += 2
        elif letter == "'" and text[max(start, position - 1)] == "$":
            position = end_of_ansi(text, position)
        elif letter in "'\"`":
            position = end_of_quote(text, position)
        else:
            yield position, letter
            position += 1


def unquoted(word: str, letters: str) -> list[int]:
    """Positions of certain characters outside of quotes and expansions."""
    positions: list[int] = []
    until = 0
    for position, item in outside_quotes(word):
        if position < until:
            continue
        if item == "$" and word[position + 1 : position + 2] in ("{", "("):
            until = closing(word, position + 1)
            if until < 0:
                return positions
        elif item in letters:
            positions.append(position)
    return positions


def split_words(text: str) -> list[str]:
    """The words of an expression as they are written, where quotes and expansions keep their spaces."""
    cuts = [-1, *unquoted(text, " \t\n"), len(text)]
    return [text[one + 1 : other] for one, other in pairwise(cuts) if text[one + 1 : other].strip("\\\n")]


_SEQUENCE = re.compile(r"(-?\d{1,6})\.\.(-?\d{1,6})(?:\.\.(-?\d{1,6}))?|([A-Za-z])\.\.([A-Za-z])")
_CLASS = re.compile(r"\[[!^]?\]?(?:\[:\w+:\]|[^\]])*\]")
_NAMED = {"alnum": "A-Za-z0-9", "alpha": "A-Za-z", "digit": "0-9", "lower": "a-z", "upper": "A-Z", "space": r"\s"}
_MOST = 10_000


def regular(pattern: str) -> str:
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
            parts.append(".*")
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
