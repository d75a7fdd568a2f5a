"""Prompts on disk: made once from their sources, and read one by one when a run draws them.

The folder is that of `row_store.py`. A prompt is the number of its tokens, the tokens, and JSON of everything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from attrs import asdict, frozen

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.data.group_lines import decoded, encoded
from skyrl.data.prompt_facts import PromptFacts
from skyrl.data.row_store import RowFolder, StoredRows, row_key, store_rows
from skyrl.errors import DataError, RunError
from skyrl.trajectory import Prompt

_ID = np.dtype("<i4")


@frozen(kw_only=True)
class PromptStore:
    """Where prompts are stored, and what they depend on besides sources, tokenizer and template."""

    path: str
    settings: Mapping[str, Any]

    def folder(self, sources: Sequence[str], tokenizer: ChatTokenizer) -> RowFolder:
        """The folder of the prompts of these sources."""
        return RowFolder(self.path, row_key(sources, tokenizer, {"kind": "prompts", **self.settings}))


def stored_prompts(
    folder: RowFolder, prompts: Iterable[Prompt], summarize: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Arguments of a `PromptDataset`: the prompts of a folder, which `prompts` fills unless an earlier run has, and the
    other values, which `summarize` gives once `prompts` has ended.
    """

    def serialized() -> Iterator[tuple[str, bytes]]:
        for prompt in prompts:
            try:
                yield prompt.id, prompt_to_bytes(prompt)
            except RunError as error:
                raise DataError(f"row {prompt.id} cannot be stored (data.tokenized_path): {error}") from error

    def fill(scratch: Path) -> dict[str, Any]:
        store_rows(scratch, serialized())
        about = dict(summarize())
        return {**about, "facts": asdict(about["facts"])}

    about = folder.about() or folder.fill(fill)
    return {
        "prompts": StoredRows(folder.path, prompt_of_bytes),
        "facts": PromptFacts(**about["facts"]),
        "sizes": tuple(about["sizes"]),
        "too_long": about["too_long"],
        "bad_rows": tuple(about["bad_rows"]),
    }


def prompt_to_bytes(prompt: Prompt) -> bytes:
    """Everything but the id. Raises `RunError` for a column whose values cannot be written."""
    ids = np.asarray(prompt.token_ids, _ID)
    return len(ids).to_bytes(4, "little") + ids.tobytes() + json.dumps(_rest(prompt)).encode()


def prompt_of_bytes(row_id: str, data: bytes) -> Prompt:
    """The prompt that `prompt_to_bytes` wrote."""
    count = int.from_bytes(data[:4], "little")
    end = 4 + count * _ID.itemsize
    return _prompt(row_id, np.frombuffer(data, _ID, count, 4).tolist(), json.loads(data[end:]))


def prompt_as_object(prompt: Prompt) -> object:
    """The prompt as JSON has it. Raises `RunError` for a column whose values cannot be written."""
    return [prompt.id, list(prompt.token_ids), _rest(prompt)]


def prompt_of_object(stored: object) -> Prompt:
    """The prompt that `prompt_as_object` wrote."""
    row_id, token_ids, rest = cast(Sequence[Any], stored)
    return _prompt(row_id, token_ids, rest)


_REST = ("messages", "tools", "env_class", "data_source", "extras")
"""Fields of a prompt besides its id and its tokens, in the order in which they are stored."""


def _rest(prompt: Prompt) -> object:
    return encoded([getattr(prompt, name) for name in _REST])


def _prompt(row_id: str, token_ids: Sequence[int], rest: object) -> Prompt:
    return Prompt(id=row_id, token_ids=tuple(token_ids), **dict(zip(_REST, decoded(rest), strict=True)))
