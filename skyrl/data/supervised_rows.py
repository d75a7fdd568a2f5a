"""From rows to what supervised training takes: tokens with a mask, and pairs of chats.

A row of supervised fine-tuning is one of these, told apart by its columns:

    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}
    {"instruction": ..., "input": ..., "output": ...}                         Alpaca
    {"input_ids": [...], "labels": [...]} or with "loss_mask": [...]          tokenized already

A row of preferences has two chats, or two answers to one prompt: {"prompt": ..., "chosen": ..., "rejected": ...}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Generic, TypeVar

import numpy as np
from attrs import evolve, frozen

from skyrl.config import RewardModelConfig, SFTConfig, SupervisedConfig
from skyrl.data.chat_masks import ChatMasks, Ids, Mask, Message
from skyrl.data.sources import BadRow, Row, any_rows
from skyrl.errors import DataError

UNLEARNED = -100
"""The label of a token that is not learned, as in PyTorch's cross entropy."""


@frozen(kw_only=True, eq=False)
class SupervisedRow:
    """One sequence, and which of its tokens are learned."""

    id: str
    token_ids: Ids
    loss_mask: Mask

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.token_ids)

    def digest_into(self, digest: Any) -> None:
        """Everything that is learned from."""
        digest.update(len(self.token_ids).to_bytes(8, "little"))
        digest.update(self.token_ids.tobytes() + self.loss_mask.tobytes())


@frozen(kw_only=True, eq=False)
class PreferenceRow:
    """Two sequences, the first of which is better."""

    id: str
    chosen: Ids
    rejected: Ids

    @property
    def length(self) -> int:
        """Of the longer one, in tokens."""
        return max(len(self.chosen), len(self.rejected))

    def digest_into(self, digest: Any) -> None:
        """Everything that is learned from."""
        for ids in (self.chosen, self.rejected):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.tobytes())


R = TypeVar("R", SupervisedRow, PreferenceRow)


@frozen(kw_only=True)
class Rows(Generic[R]):
    """Rows in the order of their sources, and what became of the others."""

    rows: tuple[R, ...]
    sizes: tuple[int, ...]
    """Rows of each source."""

    too_long: int = 0
    bad_rows: tuple[str, ...] = ()
    """Where rows were skipped, and why."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of all rows, in order."""
        digest = sha256()
        for row in self.rows:
            row.digest_into(digest)
        return digest.hexdigest()


def load_supervised(sources: Sequence[str], tokenizer: Any, run: SFTConfig, max_length: int) -> Rows[SupervisedRow]:
    """Every row of the sources, tokenized and masked. Raises `DataError` as `bad_rows` says, and where none is left."""
    masks = ChatMasks(tokenizer, all_messages=run.train_on_what == "all_assistant_messages")

    def read(row: Row, row_id: str) -> SupervisedRow:
        ids, mask = _tokens_of(row, masks, run, len(tokenizer))
        mask = mask.copy()
        mask[:1] = False  # nothing predicts the first token
        return SupervisedRow(id=row_id, token_ids=ids, loss_mask=mask)

    def cut(row: SupervisedRow) -> SupervisedRow | None:
        short = evolve(row, token_ids=row.token_ids[:max_length], loss_mask=row.loss_mask[:max_length])
        return short if short.loss_mask.any() else None

    def refuse_idle(row: SupervisedRow) -> SupervisedRow:
        if not row.loss_mask.any():
            raise DataError("no token of it is learned")
        return row

    return _load(sources, run, max_length, lambda row, row_id: refuse_idle(read(row, row_id)), cut)


def load_preferences(
    sources: Sequence[str], tokenizer: Any, run: RewardModelConfig, max_length: int
) -> Rows[PreferenceRow]:
    """Every pair of the sources, tokenized. Raises `DataError` as `bad_rows` says, and where none is left.

    A longer pair is never cut: its score is read at the end.
    """
    masks = ChatMasks(tokenizer)

    def read(row: Row, row_id: str) -> PreferenceRow:
        chosen, rejected = (
            masks(preference_chat(row, key, run.prompt_key))[0] for key in (run.chosen_key, run.rejected_key)
        )
        if np.array_equal(chosen, rejected):
            raise DataError(f"{run.chosen_key} and {run.rejected_key} are the same")
        return PreferenceRow(id=row_id, chosen=chosen, rejected=rejected)

    return _load(sources, run, max_length, read, lambda row: None)


def preference_chat(row: Row, key: str, prompt_key: str) -> list[Message]:
    """The whole chat of one side of a pair. Raises `DataError`."""
    if row.get(key) is None:
        raise DataError(f"it has no {key} (see chosen_key and rejected_key); its columns are {', '.join(row)}")
    prompt, said = row.get(prompt_key), row[key]
    before: list[Message] = []
    if isinstance(prompt, str):
        before = [{"role": "user", "content": prompt}]
    elif prompt is not None:
        before = _messages(prompt, prompt_key)
    if isinstance(said, str):
        if not before:
            raise DataError(f"{key} is a text and there is no {prompt_key}: give a prompt, or whole chats")
        return [*before, {"role": "assistant", "content": said}]
    return [*before, *_messages(said, key)]


def _tokens_of(row: Row, masks: ChatMasks, run: SFTConfig, vocabulary: int) -> tuple[Ids, Mask]:
    if row.get("input_ids") is not None and row.get(run.messages_key) is None:
        return _tokenized(row, vocabulary)
    if row.get(run.messages_key) is not None:
        messages = _messages(row[run.messages_key], run.messages_key)
    elif isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    else:
        raise DataError(
            f"it has neither {run.messages_key} (messages_key), nor instruction and output, nor input_ids; its columns "
            f"are {', '.join(row)}"
        )
    system = row.get(run.system_key)
    if isinstance(system, str) and system and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return masks(messages, _tools(row.get(run.tools_key), run.tools_key))


def _tokenized(row: Row, vocabulary: int) -> tuple[Ids, Mask]:
    labels = row.get("labels")
    marks = labels if labels is not None else row.get("loss_mask")
    ids = _whole_numbers(row["input_ids"], "input_ids")
    mask = np.ones(len(ids), dtype=np.int64) if marks is None else _whole_numbers(marks, "labels or loss_mask")
    if mask.shape != ids.shape or not len(ids):
        raise DataError(f"{len(ids)} input_ids have {len(mask)} labels, or are no list")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise DataError(f"input_ids go from {ids.min()} to {ids.max()}, and the tokenizer has 0 to {vocabulary - 1}")
    if labels is not None:
        learned = mask != UNLEARNED
        if (mask[learned] != ids[learned]).any():
            raise DataError("labels are neither input_ids nor -100; they are not shifted by one, either")
        return ids, learned
    if not np.isin(mask, (0, 1)).all():
        raise DataError("loss_mask has other numbers than 0 and 1")
    return ids, mask.astype(np.bool_)


def _whole_numbers(given: Any, name: str) -> Ids:
    """A flat list of them. Raises `DataError`: nothing is rounded."""
    try:
        found = np.asarray(given)
    except ValueError:  # lists of different lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or not (len(found) == 0 or found.dtype.kind in "iub"):
        raise DataError(f"{name} is {_short(given)}, not a list of whole numbers")
    return found.astype(np.int64)


def _messages(given: Any, key: str) -> list[Message]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise DataError(f"{key} is {_short(given)}, not a list of messages such as {{'role': 'user', 'content': ...}}")
    for message in given:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"the message {_short(message)} in {key} has no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DataError(f"the message {_short(message)} in {key} has no text as its content")
    return [{name: value for name, value in message.items() if value is not None} for message in given]


def _tools(given: Any, key: str) -> Sequence[Any] | None:
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except ValueError as error:
            raise DataError(f"{key} is not JSON: {error}") from None
    if given and not isinstance(given, Sequence):
        raise DataError(f"{key} is {_short(given)}, not a list of tools")
    return given or None


def _load(
    sources: Sequence[str],
    run: SupervisedConfig,
    max_length: int,
    read: Callable[[Row, str], R],
    cut: Callable[[R], R | None],
) -> Rows[R]:
    rows: list[R] = []
    bad: list[str] = []
    sizes = []
    too_long = 0
    for number, source in enumerate(sources):
        before = len(rows)
        for place, found in enumerate(any_rows(source)):
            try:
                row = _row(found, f"{number}:{place}", read)
            except DataError as error:
                bad.append(str(error) if isinstance(found, BadRow) else f"{source}, row {place}: {error}")
                if run.bad_rows == "stop":
                    hint = " (bad_rows = skip leaves such rows out, and counts them)"
                    raise DataError(bad[-1] + hint) from error
                continue
            short = row if row.length <= max_length else cut(row) if run.too_long == "truncate" else None
            too_long += short is None
            rows += [] if short is None else [short]
        sizes.append(len(rows) - before)
    if not rows:
        raise DataError(
            f"no row of {', '.join(sources)} can be trained on: {too_long} are longer than max_length = {max_length} "
            f"tokens, and {len(bad)} are bad" + (f"; the first: {bad[0]}" if bad else "")
        )
    return Rows(rows=tuple(rows), sizes=tuple(sizes), too_long=too_long, bad_rows=tuple(bad))


def _row(found: Row | BadRow, row_id: str, read: Callable[[Row, str], R]) -> R:
    if isinstance(found, BadRow):
        raise DataError(found.reason)
    return read(found, row_id)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
