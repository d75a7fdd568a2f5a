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
