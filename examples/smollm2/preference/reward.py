"""Measures of sampled answers."""

from __future__ import annotations

POLITE = ("happy to help", "good question", "with pleasure", "thank you", "please ask", "hope this helps")
RUDE = ("stupid question", "not again", "do not know?", "my time", "leave me alone", "look it up", "even a child")


def words(completion: str, **others: object) -> float:
    """Number of words."""
    return float(len(completion.split()))


def politeness(completion: str, **others: object) -> float:
    """1 if the answer has a friendly phrase of the pairs and no rude one, otherwise 0."""
    friendly, rude = (any(phrase in completion.lower() for phrase in phrases) for phrases in (POLITE, RUDE))
    return float(friendly and not rude)
