"""Facts that a run asks about all of its prompts, gathered in the one pass that makes them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import xxhash
from attrs import define, field, frozen

from skyrl.chats.contents import asks_nothing
from skyrl.trajectory import Prompt

_PARTS = 32
"""Number of parts into which the data is hashed, so that a change can be located."""


@frozen(kw_only=True)
class PromptFacts:
    """Facts about all prompts of a dataset."""

    columns: Mapping[str, Sequence[str]]
    """For each task, the names of the columns that its prompts pass to it."""

    origins: Mapping[str, Sequence[str]]
    """For each data source, the first parts of the ids of its prompts: numbers of the sources they were read from."""

    longest: int
    """Tokens of the longest prompt."""

    empty: int = 0
    """Number of prompts of which no message has text, the system message aside."""

    content: str
    """sha256 of what training depends on: the tokens, the task and the other columns of every prompt, in order."""

    parts: Mapping[str, str]
    """A digest for each range of consecutive prompts, named like `0 to 374`: at most 32 ranges in total."""


@define
class FactGatherer:
    """Facts about the prompts that were added so far."""

    _columns: dict[str, dict[str, None]] = field(factory=dict)
    _origins: dict[str, dict[str, None]] = field(factory=dict)
    _longest: int = 0
    _empty: int = 0
    _digest: Any = field(factory=sha256)
    _rows: array[int] = field(factory=lambda: array("Q"))

    def add(self, prompt: Prompt) -> None:
        """Add the next prompt."""
        self._columns.setdefault(prompt.env_class, {}).update(dict.fromkeys(prompt.extras))
        self._origins.setdefault(prompt.data_source, {})[prompt.id.partition(":")[0]] = None
        self._longest = max(self._longest, len(prompt.token_ids))
        self._empty += asks_nothing(prompt.messages)
        others = json.dumps([prompt.env_class, prompt.data_source, prompt.extras], sort_keys=True, default=_plain)
        ids = np.asarray(prompt.token_ids, dtype=np.int64).tobytes()
        content = len(prompt.token_ids).to_bytes(8, "little") + ids + others.encode() + b"\n"
        self._digest.update(content)
        self._rows.append(xxhash.xxh3_64_intdigest(content))

    def facts(self) -> PromptFacts:
        """The facts."""
        return PromptFacts(
            columns={task: list(names) for task, names in self._columns.items()},
            origins={source: list(numbers) for source, numbers in self._origins.items()},
            longest=self._longest,
            empty=self._empty,
            content=self._digest.hexdigest(),
            parts=_parts(np.asarray(self._rows)),
        )


def facts_of(prompts: Iterable[Prompt]) -> PromptFacts:
    """Facts about these prompts."""
    gatherer = FactGatherer()
    for prompt in prompts:
        gatherer.add(prompt)
    return gatherer.facts()


def _plain(value: object) -> Any:
    """A JSON-compatible form of values that JSON does not support: bytes, dates, a frozen mapping."""
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _parts(rows: np.ndarray[Any, np.dtype[np.uint64]]) -> dict[str, str]:
    size = -(-len(rows) // _PARTS)
    return {
        f"{start} to {start + len(part) - 1}": xxhash.xxh3_64_hexdigest(part.tobytes())
        for start in range(0, len(rows), size or 1)
        for part in [rows[start : start + size]]
    }
