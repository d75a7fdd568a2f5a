"""Are two answers the same in mathematics? The side that runs in a sandbox: math-verify (Hugging Face), without its
own timeouts, which need signals; whoever asks has a deadline and ends this process.

Only LaTeX is read, by a grammar: nothing of an answer is run as Python.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from skyrl.sandbox.worker import answer_lines


def main() -> None:
    """Answer `[answer, ground truth]` with true or false."""
    logging.disable()
    answer_lines(_same)


def _same(asked: Sequence[str]) -> bool:
    ours, gold = (
        parse(f"\\boxed{{{text}}}", extraction_config=[LatexExtractionConfig()], parsing_timeout=None) for text in asked
    )
    return bool(ours and gold and verify(gold, ours, timeout_seconds=None))
