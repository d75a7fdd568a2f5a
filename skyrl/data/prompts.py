"""Makes prompts from rows: chat template, length filter, and the task that judges the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from skyrl.chats.contents import ALLOW_DROPPED, tool_name
from skyrl.chats.deadline import bounded
from skyrl.chats.rendering import Template
from skyrl.chats.text import encoded, template_name, text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.data.conversations import from_json, refuse_media, without_nulls
from skyrl.data.sources import BadRow, Columns, Row, answered, chat_of, in_table, is_missing, read_rows
from skyrl.errors import DataError
from skyrl.processes.garbage import seldom_collected
from skyrl.trajectory import Prompt

_OWN_COLUMNS = ("env_class", "data_source")

Refuses = Callable[[str, Mapping[str, Any]], str | None]
"""Function from a task's name and the columns that it receives to the reason why the task refuses the row; None if it
accepts it."""


@frozen(kw_only=True)
class PromptDataset:
    """Prompts in the order of their sources, and counts of the rows that are not prompts."""

    prompts: tuple[Prompt, ...]
    too_long: int = 0
    """Number of rows that were longer than allowed."""

    bad_rows: tuple[str, ...] = ()
    """Reasons of the rows that were skipped because they are not prompts."""

    sizes: tuple[int, ...] = field()
    """Number of prompts of each source."""

    @sizes.default
    def _one_source(self) -> tuple[int, ...]:
        return (len(self.prompts),)

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything that training depends on: see `content_hash`. With several sources, it includes their
        sizes.
        """
        whole = content_hash(self.prompts)
        return whole if len(self.sizes) == 1 else sha256(f"{whole} {self.sizes}".encode()).hexdigest()


def content_hash(prompts: Sequence[Prompt]) -> str:
    """sha256 over the tokens, the task and the other columns of every prompt, in order."""
    digest = sha256()
    for prompt in prompts:
        digest.update(len(prompt.token_ids).to_bytes(8, "little"))
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes())
        others = [prompt.env_class, prompt.data_source, prompt.extras]
        digest.update(json.dumps(others, sort_keys=True, default=_plain).encode() + b"\n")
    return digest.hexdigest()


@seldom_collected()
def load_prompts(
    sources: Sequence[str],
    tokenizer: ChatTokenizer,
    *,
    env_class: str | None,
    max_prompt_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    columns: Columns | None = None,
    skip_bad_rows: bool = False,
    refuses: Refuses | None = None,
    rendered: bool = True,
) -> PromptDataset:
    """Read every source and tokenize each row's chat with the model's template.

    Rows longer than `max_prompt_length` tokens are left out and counted, and so are rows that are not prompts if
    `skip_bad_rows` is set. A row may name its own `env_class`; without one it gets `env_class`, if that is not None. A
    row that `refuses` gives a reason against is bad, and so is one of which the template drops a part, unless the row
    sets `allow_dropped_content`. Without `rendered`, the policy sees other text, such as that of an agent, and nothing
    is checked. Raises `DataError` for a bad source or row, and when no row is left.
    """
    template = Template(tokenizer=tokenizer, arguments=chat_template_kwargs or {})
    read = _Reader(tokenizer, template, rendered, env_class, columns or Columns(), refuses)
    prompts: list[Prompt] = []
    bad: list[str] = []
    sizes = []
    for number, source in enumerate(sources):
        found = list(read.prompts(source, number))
        own = [prompt for prompt in found if isinstance(prompt, Prompt) and len(prompt.token_ids) <= max_prompt_length]
        reasons = [row.reason for row in found if isinstance(row, BadRow)]
        if reasons and not skip_bad_rows:
            raise DataError(_stopped_by(reasons))
        sizes.append((len(own), len(found) - len(own) - len(reasons)))
        prompts, bad = prompts + own, bad + reasons
    too_long = sum(long for _, long in sizes)
    if not prompts:
        if not too_long:
            raise DataError(f"no row of {', '.join(sources)} is a prompt; the first: {bad[0]}")
        also = f", and {len(bad)} more {'is' if len(bad) == 1 else 'are'} bad" if bad else ""
        raise DataError(
            f"all {too_long} rows of {', '.join(sources)} are longer than "
            f"trainer.max_prompt_length = {max_prompt_length} tokens{also}"
        )
    short = tuple(count for count, _ in sizes)
    return PromptDataset(prompts=tuple(prompts), too_long=too_long, bad_rows=tuple(bad), sizes=short)


@frozen
class _Chat:
    """The part of a row that the policy is shown."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    allow_dropped: bool = False


@frozen
class _Reader:
    tokenizer: Any
    template: Template
    rendered: bool
    env_class: str | None
    columns: Columns
    refuses: Refuses | None

    def prompts(self, source: str, number: int) -> Iterator[Prompt | BadRow]:
        """A prompt or `BadRow` for each row of the source, which has index `number` in the run."""
        rows: dict[int, tuple[Row, _Chat]] = {}
        bad: dict[int, BadRow] = {}
        whole = read_rows(source, self.columns)
        for place, row in enumerate(whole):
            try:
                rows[place] = self._chat(row, place, source)
            except DataError as error:
                bad[place] = BadRow(str(error))
        ids = self._tokenize({place: chat for place, (_, chat) in rows.items()}, source)
        for place in range(len(whole)):
            tokens = bad.get(place) or ids[place]
            if isinstance(tokens, BadRow):
                yield tokens
            else:
                yield self._prompt(*rows[place], tokens, f"{number}:{place}")

    def _chat(self, row: Row | BadRow, place: int, source: str) -> tuple[Row, _Chat]:
        if isinstance(row, BadRow):
            raise DataError(row.reason)
        whole = answered(row, place, source, self.columns)
        task = whole.get("env_class") or self.env_class
        if not isinstance(task, str):
            raise DataError(f"{source}, row {place} names no env_class, and environment.env_class gives no default")
        if self.refuses and (reason := self.refuses(task, extras_of(whole, self.columns))):
            raise DataError(f"{source}, row {place} {reason}")
        messages = chat_of(whole, place, source, self.columns)
        if in_table(source):
            messages = tuple(map(without_nulls, messages))
        if not self.rendered:
            return whole, _Chat(messages)
        allowed = bool(whole.get(ALLOW_DROPPED))
        try:
            if not allowed:
                refuse_media({key: value for key, value in whole.items() if not isinstance(value, str)})
            return whole, _Chat(messages, tools_in(whole, source), allowed)
        except DataError as error:
            raise DataError(f"{source}, row {place}: {error}") from error

    def _tokenize(self, chats: Mapping[int, _Chat], source: str) -> dict[int, list[int] | BadRow]:
        """The tokens of each chat, or why it is bad."""
        made: dict[int, list[int] | BadRow] = {}
        texts: dict[int, str] = {}
        with bounded(template_name(self.tokenizer), len(chats)):
            texts |= self._texts_together(chats)
            for place, chat in chats.items():
                if place in texts:
                    continue
                try:
                    texts[place] = self._text(chat)
                except DataError as error:
                    made[place] = BadRow(f"{source}, row {place}: {error}")
        return made | self._encode(texts, source)

    def _texts_together(self, chats: Mapping[int, _Chat]) -> dict[int, str]:
        """The texts of chats that can be rendered in one call; none of them if the template refuses one."""
        places = [place for place, chat in chats.items() if self.rendered and not chat.tools]
        try:
            texts = self.template.prompts([chats[place].messages for place in places])
        except DataError:
            return {}
        return {place: text for place, text in zip(places, texts, strict=True) if text is not None}

    def _text(self, chat: _Chat) -> str:
        if not self.rendered:
            return self.template.text(chat.messages)
        shown = evolve(self.template, tools=chat.tools) if chat.tools else self.template
        return shown.prompt(chat.messages, allow_dropped=chat.allow_dropped)

    def _encode(self, texts: Mapping[int, str], source: str) -> dict[int, list[int] | BadRow]:
        """Tokenize all texts at once, which is faster; one by one if the tokenizer refuses one of them."""
        try:
            return dict(zip(texts, encoded(self.tokenizer, [*texts.values()]), strict=True))
        except Exception:  # noqa: BLE001 - tokenizers raise whatever they like for a text that is not Unicode
            return {place: self._one(text, place, source) for place, text in texts.items()}

    def _one(self, text: str, place: int, source: str) -> list[int] | BadRow:
        try:
            return text_tokens(self.tokenizer, text)
        except Exception as error:  # noqa: BLE001 - as above
            return BadRow(f"{source}, row {place}: the tokenizer refuses the prompt: {error}")

    def _prompt(self, row: Row, chat: _Chat, token_ids: Sequence[int], row_id: str) -> Prompt:
        return Prompt(
            id=row_id,
            messages=chat.messages,
            token_ids=tuple(token_ids),
            tools=chat.tools,
            env_class=row.get("env_class") or str(self.env_class),
            data_source=data_source_of(row),
            extras=extras_of(row, self.columns),
        )


def extras_of(row: Row, columns: Columns) -> dict[str, Any]:
    """The columns of a row that are passed to its environment unchanged."""
    own = (*_OWN_COLUMNS, columns.prompt)
    return {key: value for key, value in row.items() if key not in own and value is not None}


def tools_in(row: Row, source: str) -> tuple[Mapping[str, Any], ...]:
    """The tools that a row brings for the policy: its column `tools`, a list of JSON schemas or the JSON text of one.

    Anything else in this column, such as a list of names, is for the environment alone. Raises `DataError` for a text
    that begins as a list and is not JSON.
    """
    given = row.get("tools")
    if isinstance(given, str) and given.lstrip().startswith("["):
        given = from_json(given, "tools")
    if not isinstance(given, list | tuple) or not all(map(tool_name, given)):
        return ()
    return tuple(without_nulls(given) if in_table(source) else given)


NO_SOURCE = "default"
"""Name of the data source of rows that name none."""


def data_source_of(row: Row) -> str:
    """Name of the data source under which a row is reported."""
    source = row.get("data_source")
    return NO_SOURCE if is_missing(source) or source == "" else str(source)


def _stopped_by(reasons: Sequence[str]) -> str:
    """The first reason, the number of other bad rows, and the places of the next ones."""
    others = len(reasons) - 1
    counted = f" ({others} more {'row is' if others == 1 else 'rows are'} bad)" if others else ""
    following = "".join(f"\n  {reason}" for reason in reasons[1:3])
    return f"{reasons[0]}{counted}; data.bad_rows = skip leaves such rows out{following}"


def _plain(value: object) -> Any:
    """A JSON-compatible form of values that JSON does not support: bytes, dates, a frozen mapping."""
    return dict(value) if isinstance(value, Mapping) else repr(value)
