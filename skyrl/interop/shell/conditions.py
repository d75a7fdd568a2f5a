"""Decides `[ ... ]` and `[[ ... ]]` where the script determines their operands."""

from __future__ import annotations

import re
from collections.abc import Callable

from attrs import define

from skyrl.interop.shell.syntax import regular, split_words
from skyrl.interop.shell.unknown import is_known, outside
from skyrl.interop.shell.words import Words

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda one, other: one == other,
    "-ne": lambda one, other: one != other,
    "-lt": lambda one, other: one < other,
    "-le": lambda one, other: one <= other,
    "-gt": lambda one, other: one > other,
    "-ge": lambda one, other: one >= other,
}
_TEXTS = ("=", "==", "!=", "=~", "<", ">")
_FILES = ("-nt", "-ot", "-ef")


def holds(expression: str, words: Words, *, is_double: bool) -> bool | None:
    """Whether the expression between the brackets holds; None if only running the script would tell."""
    spaced = re.sub(r"(?<=\s)([()])(?=\s*)", r" \1 ", f" {expression} ") if is_double else expression
    raw = split_words(spaced.replace("\\\n", "  "))
    fields = raw if is_double else [known(field, words, word) for word in raw for field in words.fields(word)]
    test = _Test(fields, words, is_double)
    try:
        result = test.either()
        return result if test.position == len(test.words) else None
    except (ValueError, RecursionError):  # an expression that a shell would not accept, or that this does not read
        return None


def known(text: str, words: Words, word: str) -> str:
    """The text of a word, where variables from outside are assumed to be unset."""
    if is_known(text) or not (names := outside(text)):
        return text
    for name in names:
        words.variables.assume_unset(name, "false" if len(names) == 1 else "")
    return words.text(word)


@define
class _Test:
    words: list[str]
    expand: Words
    is_double: bool
    position: int = 0

    def either(self) -> bool | None:
        result = self._both()
        while self._accept("||" if self.is_double else "-o"):
            other = self._both()
            result = True if result or other else None if result is None or other is None else False
        return result

    def _both(self) -> bool | None:
        result = self._primary()
        while self._accept("&&" if self.is_double else "-a"):
            other = self._primary()
            result = False if result is False or other is False else None if result is None or other is None else True
        return result

    def _accept(self, word: str) -> bool:
        if self.position < len(self.words) and self.words[self.position] == word:
            self.position += 1
            return True
        return False

    def _primary(self) -> bool | None:
        left = len(self.words) - self.position
        if not left:
            return False
        operator = self.words[self.position + 1] if left >= 2 else ""
        if left >= 3 and (operator in _TEXTS or operator in _NUMBERS or operator in _FILES):
            return self._binary(operator)
        if left > 1 and self._accept("!"):
            result = self._primary()
            return None if result is None else not result
        if left > 1 and (self._accept("(") or self._accept("\\(")):
            result = self.either()
            if not self._accept(")") and not self._accept("\\)"):
                raise ValueError("a parenthesis that is not closed")
            return result
        word = self.words[self.position]
        self.position += 1
        if re.fullmatch(r"-[a-zA-Z]", word) and left > 1 and operator not in ("&&", "||", ")"):
            self.position += 1
            return self._unary(word, operator)
        text = self._text(word)
        return bool(text) if is_known(text) else None

    def _text(self, word: str) -> str:
        return known(self.expand.text(word), self.expand, word) if self.is_double else word

    def _unary(self, operator: str, operand: str) -> bool | None:
        if operator == "-v":
            name = self._text(operand)
            if self.expand.variables.is_outside(name):
                self.expand.variables.assume_unset(name, "not set")
            return self.expand.variables.get(name) is not None
        text = self._text(operand)
        if operator not in ("-z", "-n") or not is_known(text):
            return None
        return bool(text) == (operator == "-n")

    def _binary(self, operator: str) -> bool | None:
        left, right = self.words[self.position], self.words[self.position + 2]
        self.position += 3
        one = self._text(left)
        if operator in _NUMBERS:
            first, second = self._number(one), self._number(self._text(right))
            return None if first is None or second is None else _NUMBERS[operator](first, second)
        if operator in _FILES or not is_known(one):
            return None
        if self.is_double and operator in ("=", "==", "!="):
            pattern = self.expand.pattern(right)
            if not is_known(pattern):
                pattern = known(pattern, self.expand, right)
            return None if not is_known(pattern) else bool(re.fullmatch(regular(pattern), one)) == (operator != "!=")
        other = self._text(right)
        if not is_known(other):
            return None
        if operator == "=~":
            return re.search(other, one) is not None if not re.search(r"[\\[]", other) else None
        if operator in "<>":
            return one < other if operator == "<" else one > other
        return (one == other) == (operator != "!=")

    def _number(self, text: str) -> int | None:
        text = self.expand.sum(text) if self.is_double and is_known(text) else text.strip()
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else None
