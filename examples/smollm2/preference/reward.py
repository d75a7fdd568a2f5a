"""Measures of sampled answers."""

from __future__ import annotations

POLITE = ("happy to help", "good question", "with pleasure", "thank you", "please ask", "hope this helps")


def words(completion: str, **others: object) -> float:
    """Number of words."""
    return float(len(completion.split()))


def politeness(completion: str, **others: object) -> float:
    """1 if the answer has one of the friendly phrases of the pairs, otherwise 0."""
    return float(any(phrase in completion.lower() for phrase in POLITE))
