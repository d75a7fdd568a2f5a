"""Compares two answers as mathematics, inside the sandbox: math-verify (Hugging Face) without its own timeouts, which
need signals; the caller has a deadline and ends this process.

Answers are parsed as LaTeX by a grammar and never run as Python.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from skyrl.sandbox.worker import answer_lines


def main() -> None:
    """Answer each `[answer, ground truth]` with true or false."""
    logging.disable()
    answer_lines(_same)


def _same(asked: Sequence[str]) -> bool:
    ours, gold = (
        parse(f"\\boxed{{{text}}}", extraction_config=[LatexExtractionConfig()], parsing_timeout=None) for text in asked
    )
    return bool(ours and gold and verify(gold, ours, timeout_seconds=None))
