"""A reward that is wrong on purpose."""

from __future__ import annotations


def words(completion: str, **others: object) -> float:
    """The number of words in the answer, whatever they say."""
    return float(len(completion.split()))
