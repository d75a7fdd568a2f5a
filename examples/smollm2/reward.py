"""The reward of a sum."""

from __future__ import annotations

import re


def last_number_is_right(completion: str, ground_truth: str, **others: object) -> float:
    """1 if the last number in the answer is the sum, as in `3 + 4 = 7`, otherwise 0."""
    return float(re.findall(r"\d+", completion)[-1:] == [ground_truth])
