"""Compares two answers as mathematics, inside the sandbox: math-verify (Hugging Face) without its own timeouts, which
need signals; the caller has a deadline and ends this process.

Answers are parsed as LaTeX by a grammar and never run as Python.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import Add, Basic, Function, Mul, Pow, nan, oo, preorder_traversal, zoo

from skyrl.sandbox.worker import answer_lines

_DIGIT = re.compile("[0-9]")


def main() -> None:
    """Answer each `[answer, ground truth]` with true or false."""
    logging.disable()
    answer_lines(_is_equal)


def _is_equal(expressions: Sequence[str]) -> bool:
    """Whether an answer and a ground truth are equal, and the answer has a value: it computes with no infinity, and is
    not equal to something else as well.
    """
    ours, gold = map(_parsed, expressions)
    if not (ours and gold and _equal(gold, ours)) or any(map(_computes_with_infinity, ours)):
        return False
    other = _parsed(_changed(expressions[1]))
    return not _equal(other, ours) or _equal(gold, other)


def _parsed(text: str) -> list[object]:
    return list(parse(f"\\boxed{{{text}}}", extraction_config=[LatexExtractionConfig()], parsing_timeout=None))


def _equal(gold: list[object], answer: list[object]) -> bool:
    return bool(verify(gold, answer, timeout_seconds=None))


def _computes_with_infinity(parsed: object) -> bool:
    r"""Whether infinity is more than a value or a bound in it: sympy finds that `5^{5^{\infty}}` is any number."""
    if not isinstance(parsed, Basic):
        return False
    computed = (item for item in preorder_traversal(parsed) if isinstance(item, Add | Mul | Pow | Function))
    return any(entry.has(oo, -oo, zoo, nan) and entry != -oo for entry in computed)


def _changed(text: str) -> str:
    """The text with every digit changed; without any digit, the text and one more."""
    other = _DIGIT.sub(lambda digit: str((int(digit[0]) + 1) % 10), text)
    return other if other != text else f"{text}+1"


_is_equal(("1", "x"))  # grammars and tables load at the first use: here once, before workers are forked
