"""The columns of a dataset's row as they are kept beside its samples: as JSON, and bounded in size."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from itertools import islice
from math import isfinite
from numbers import Integral, Real

from skyrl.envs.rows import ground_truths, tokenizable
from skyrl.processes.redaction import redacted_tree

LONGEST_TEXT = 2000
"""Largest number of characters kept of one text."""

MOST_CHARACTERS = 8000
"""Largest number of characters kept of all texts of one row together."""

_BEYOND = 4096
"""Number of characters after a cut in which a secret that the cut would divide is still recognised."""

_CHARACTERS_EACH = 4
"""Number of characters that a value counts as, beside those of its text: numbers and brackets take room, too."""

_MOST_ITEMS = 64
_DEEPEST = 6
_LARGEST_WHOLE = 2**63


def kept_columns(extras: Mapping[str, object]) -> dict[str, object]:
    """`ground_truth`, the expected answer, and `columns`, all columns of a row, each only if there is any.

    Texts, lists, tables and the whole are cut to bounds, and end with "… N more" where they are. What JSON has no form
    for is named by its type, as `<bytes>`; NaN and infinity are texts.
    """
    room = _Room(MOST_CHARACTERS)
    truths = list(ground_truths(extras).values())
    kept = {"ground_truth": room.kept(truths[0])} if truths else {}
    return kept | ({"columns": room.kept(extras)} if extras else {})


class _Room:
    """Converts values to JSON until the characters of a row are used up."""

    def __init__(self, characters: int) -> None:
        self._left = characters

    def kept(self, value: object, depth: int = 0) -> object:
        """A value that `json.dumps` takes, with `allow_nan=False` and for UTF-8."""
        self._left -= _CHARACTERS_EACH
        match value:
            case None | bool():
                return value
            case str():
                return self._text(value)
            case Integral():
                return int(value) if abs(int(value)) < _LARGEST_WHOLE else f"<number of {int(value).bit_length()} bits>"
            case Real():
                return float(value) if isfinite(value) else str(float(value))
            case date() | time() | Decimal():
                return self._text(str(value))
            case Mapping() | list() | tuple() if depth == _DEEPEST:
                return "…"
            case Mapping():
                pairs = islice(value.items(), _MOST_ITEMS)
                table = {self._text(str(key)): self.kept(item, depth + 1) for key, item in pairs if self._left > 0}
                return table | ({"…": f"{len(value) - len(table)} more"} if len(table) < len(value) else {})
            case list() | tuple():
                items = [self.kept(entry, depth + 1) for entry in value[:_MOST_ITEMS] if self._left > 0]
                return [*items, f"… {len(value) - len(items)} more"] if len(items) < len(value) else items
        return f"<{type(value).__name__}>"

    def _text(self, text: str) -> str:
        """The text, cut. Nobody has checked that it can be written as UTF-8."""
        most = max(0, min(LONGEST_TEXT, self._left))
        if len(text) <= most:
            self._left -= len(text)
            return tokenizable(text)
        excerpt = redacted_tree(tokenizable(text[: most + _BEYOND]))[:most]
        self._left -= len(excerpt)
        return f"{excerpt}… {len(text) - most} more"
