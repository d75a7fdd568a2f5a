"""Filter and order of a list of samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

ORDERS: Mapping[str, str] = {
    "newest": "step DESC, id",
    "oldest": "id",
    "highest reward": "reward DESC, id",
    "lowest reward": "reward IS NULL, reward, id",
    "longest": "length DESC, id",
    "shortest": "length, id",
}
"""Orders by the name that a page shows, as SQL."""

_MIXED = "SELECT step, prompt_id, grp FROM samples GROUP BY step, prompt_id, grp HAVING min(reward) < max(reward)"
_WORDS = re.compile(r'"([^"]*)"|(\S+)')


@frozen(kw_only=True)
class SampleFilter:
    """Conditions on samples, all of which must hold; None and an empty text mean no condition."""

    words: str = ""
    """Words that must all occur in prompt, answer or failure, in any order; `"a phrase"` must occur as it is. A word
    matches any word that begins with it."""

    step: int | None = None
    source: str = ""
    prompt: str = ""
    stop: str = ""
    failed: bool | None = None
    """Whether the environment failed or did not judge the sample."""

    mixed: bool | None = None
    """Whether the rewards of the sample's group differ: only such a group says which answer is better."""

    least_reward: float | None = None
    most_reward: float | None = None
    least_length: int | None = None
    most_length: int | None = None
    order: str = "newest"

    @property
    def is_narrow(self) -> bool:
        """Whether there are conditions besides words, step, order and the group's rewards."""
        return bool(set(self.query()) - {"words", "step", "order", "mixed", "prompt"})

    def condition(self) -> tuple[str, tuple[Any, ...]]:
        """An SQL condition and its values."""
        checks: tuple[tuple[str, Any], ...] = (
            ("step = ?", self.step),
            ("source = ?", self.source or None),
            ("prompt_id = ?", self.prompt or None),
            ("stop_reason = ?", self.stop or None),
            ("failed = ?", self.failed),
            (f"((step, prompt_id, grp) IN ({_MIXED})) = ?", self.mixed),
            ("reward >= ?", self.least_reward),
            ("reward <= ?", self.most_reward),
            ("length >= ?", self.least_length),
            ("length <= ?", self.most_length),
            ("id IN (SELECT rowid FROM words WHERE words MATCH ?)", match_of(self.words) or None),
        )
        active = [(check, value) for check, value in checks if value is not None]
        return " AND ".join(check for check, _ in active) or "1", tuple(value for _, value in active)

    def query(self) -> dict[str, str]:
        """The conditions as the query parameters of an address."""
        conditions = {name: value for name, value in asdict(self).items() if value not in (None, "")}
        return {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in conditions.items()}

    @classmethod
    def of(cls, query: Mapping[str, str]) -> SampleFilter:
        """The filter in the query parameters of an address. Raises `ValueError` with a sentence for the user."""
        order = query.get("order", "newest")
        if order not in ORDERS:
            raise ValueError(f"order is one of {', '.join(ORDERS)}")
        return cls(
            words=query.get("words", "")[:1000],
            step=_whole(query, "step"),
            source=query.get("source", ""),
            prompt=query.get("prompt", ""),
            stop=query.get("stop", ""),
            least_reward=_number(query, "least_reward"),
            most_reward=_number(query, "most_reward"),
            least_length=_whole(query, "least_length"),
            most_length=_whole(query, "most_length"),
            mixed={"0": False, "1": True}.get(query.get("mixed", "")),
            failed={"0": False, "1": True}.get(query.get("failed", "")),
            order=order,
        )


def match_of(words: str) -> str:
    """The FTS5 query for the text that a user typed: every word is quoted, so none is read as an operator."""
    terms = [(phrase or word, bool(word)) for phrase, word in _WORDS.findall(words)]
    quoted = ['"' + text.replace('"', '""') + '"' + ("*" if is_word else "") for text, is_word in terms]
    return " ".join(term for term, (text, _) in zip(quoted, terms, strict=True) if any(map(str.isalnum, text)))


def _number(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"{name} is a number") from None


def _whole(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError(f"{name} is a whole number from 0")
    return int(text) if text else None
