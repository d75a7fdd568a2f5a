"""Scores one answer with reasoning-gym, inside the sandbox."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from reasoning_gym.factory import create_dataset

from skyrl.sandbox.worker import answer_lines


def main() -> None:
    """Answer each `[task, settings, entry, answer]` with the score, or with a description of what the task raised."""
    answer_lines(lambda question: _scored(*question))


def _scored(task: str, settings: Mapping[str, Any], entry: str, answer: str) -> float | str:
    try:
        return float(create_dataset(task, **settings).score_answer(answer, ast.literal_eval(entry)))
    except BaseException as error:  # noqa: BLE001  # an answer that is evaluated may also exit
        return f"{type(error).__name__}: {error}"[:500]
