"""Suggestions for names that do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 100
"""Longest name, in characters, for which a similar one is searched."""


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that `name` most likely misspells; None if none is close, or several are equally close."""
    if len(name) > LONGEST:
        return None
    close = slips(name, candidates) or alike(name, candidates)
    return close[0] if len(close) == 1 else None


def slips(name: str, candidates: Iterable[str]) -> list[str]:
    """Candidates that differ by one inserted, missing or changed letter, by two swapped neighbours, or by case and
    dashes.
    """
    return [candidate for candidate in candidates if _is_slip(_folded(name), _folded(candidate))]


def alike(name: str, candidates: Iterable[str]) -> list[str]:
    """The closest candidate by shared letters, if close enough; else those that begin or end with `name`, or that are
    the initials of its words.
    """
    from difflib import get_close_matches

    folded = {_folded(candidate): candidate for candidate in candidates}
    target = _folded(name)
    close = get_close_matches(target, folded, n=1, cutoff=0.7)
    if not close and len(target) > 3:
        close = [key for key in folded if key.startswith(target) or key.endswith("_" + target)]
    if not close and "_" in target:  # learning_rate: lr
        close = [key for key in folded if key == "".join(word[:1] for word in target.split("_"))]
    return [folded[key] for key in close]


def _is_slip(one: str, other: str) -> bool:
    start = shared(one, other)
    one, other = one[start:], other[start:]
    end = shared(one[::-1], other[::-1])
    one, other = one[: len(one) - end], other[: len(other) - end]
    return max(len(one), len(other)) < 2 or (len(one) == 2 and one == other[::-1])


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the common prefix of two sequences."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
