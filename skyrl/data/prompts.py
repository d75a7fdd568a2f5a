"""Makes prompts from rows: chat template, length filter, and the task that judges the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import islice
from typing import Any

from attrs import define, evolve, field, frozen

from skyrl.chats.contents import ALLOW_DROPPED, tool_name
from skyrl.chats.deadline import bounded
from skyrl.chats.rendering import Template
from skyrl.chats.text import encoded, template_name, text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.data.conversations import from_json, refuse_media, without_nulls
from skyrl.data.prompt_facts import FactGatherer, PromptFacts, facts_of
from skyrl.data.row_streams import StreamedRow
from skyrl.data.sources import BadRow, Columns, Row, answered, chat_of, checked_rows, is_null, is_table, place_of
from skyrl.data.stored_prompts import PromptStore, stored_prompts
from skyrl.errors import DataError
from skyrl.processes.garbage import seldom_collected
from skyrl.trajectory import Prompt

_OWN_COLUMNS = ("env_class", "data_source")

_AT_A_TIME = 1000
"""Number of rows that are tokenized together."""

Refuses = Callable[[str, Mapping[str, Any]], str | None]
"""Function from a task's name and the columns that it receives to the reason why the task refuses the row; None if it
accepts it."""


@frozen(kw_only=True)
class PromptDataset:
    """Prompts in the order of their sources, and counts of the rows that are not prompts."""

    prompts: Sequence[Prompt]
    """In memory, or on disk and read when they are drawn."""

    too_long: int = 0
    """Number of rows that were longer than allowed."""

    bad_rows: tuple[str, ...] = ()
    """Reasons of the rows that were skipped because they are not prompts."""

    sizes: tuple[int, ...] = field()
    """Number of prompts of each source."""

    _facts: PromptFacts | None = field(default=None, eq=False, repr=False)

    @sizes.default
    def _default_sizes(self) -> tuple[int, ...]:
        return (len(self.prompts),)

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def facts(self) -> PromptFacts:
        """Facts about all prompts, known from when they were made."""
        return self._facts or facts_of(self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything that training depends on (`facts.content`), with several sources also of their sizes."""
        digest = self.facts.content
        return digest if len(self.sizes) == 1 else sha256(f"{digest} {self.sizes}".encode()).hexdigest()


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
    store: PromptStore | None = None,
) -> PromptDataset:
    """Read every source and tokenize each row's chat with the model's template.

    Rows longer than `max_prompt_length` tokens are left out and counted, and so are rows that are not prompts if
    `skip_bad_rows` is set. A row may name its own `env_class`; without one it gets `env_class`, if that is not None. A
    row that `refuses` gives a reason against is bad, and so is one of which the template drops a part, unless the row
    sets `allow_dropped_content`. Without `rendered`, the policy sees other text, such as that of an agent, and nothing
    is checked. With a `store`, prompts are kept on disk, where a later run finds them. Raises `DataError` for a bad
    source or row, and when no row is left.
    """
    template = Template(tokenizer=tokenizer, arguments=chat_template_kwargs or {})
    read = _Reader(tokenizer, template, rendered, env_class, columns or Columns(), refuses)
    selection = _Selection(read, tuple(sources), max_prompt_length, skip_bad_rows)
    if store is None:
        return PromptDataset(prompts=tuple(selection.prompts()), **selection.about())
    return PromptDataset(**stored_prompts(store.folder(sources, tokenizer), selection.prompts(), selection.about))


@define
class _Selection:
    """Reads all sources in turn, once, and counts the rows that are left out."""

    read: _Reader
    sources: tuple[str, ...]
    max_prompt_length: int
    skip_bad_rows: bool
    _facts: FactGatherer = field(factory=FactGatherer)
    _sizes: list[int] = field(factory=list)
    _too_long: int = 0
    _bad: list[str] = field(factory=list)

    def prompts(self) -> Iterator[Prompt]:
        """The prompts of all sources. Raises `DataError`."""
        for number, source in enumerate(self.sources):
            before = len(self._bad)
            self._sizes.append(0)
            for prompt in self.read.prompts(source, number):
                if isinstance(prompt, BadRow):
                    self._bad.append(prompt.reason)
                elif len(prompt.token_ids) > self.max_prompt_length:
                    self._too_long += 1
                else:
                    self._sizes[-1] += 1
                    self._facts.add(prompt)
                    yield prompt
            if self._bad[before:] and not self.skip_bad_rows:
                raise DataError(_stopped_by(self._bad[before:]))
        if not any(self._sizes):
            named, bad = ", ".join(self.sources), self._bad
            if not self._too_long:
                raise DataError(f"no row of {named} is a prompt; the first: {bad[0]}")
            also = f", and {len(bad)} more {'is' if len(bad) == 1 else 'are'} bad" if bad else ""
            raise DataError(
                f"all {self._too_long} rows of {named} are longer than "
                f"trainer.max_prompt_length = {self.max_prompt_length} tokens{also}"
            )

    def about(self) -> dict[str, Any]:
        """The values of a dataset besides its prompts, once all of them were read."""
        counts = {"too_long": self._too_long, "bad_rows": tuple(self._bad), "sizes": tuple(self._sizes)}
        return {**counts, "facts": self._facts.facts()}


class StreamedPrompts:
    """Makes prompts of streamed rows, one by one, as `load_prompts` makes them."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        env_class: str | None,
        max_prompt_length: int,
        chat_template_kwargs: Mapping[str, Any],
        columns: Columns,
        skip_bad_rows: bool,
        refuses: Refuses | None,
        rendered: bool,
    ) -> None:
        """The arguments are those of `load_prompts`."""
        template = Template(tokenizer=tokenizer, arguments=chat_template_kwargs)
        self._read = _Reader(tokenizer, template, rendered, env_class, columns, refuses)
        self._max_prompt_length, self._skip_bad_rows = max_prompt_length, skip_bad_rows

    def of_rows(self, rows: Iterable[Row | BadRow], source: str) -> Iterator[Prompt | BadRow]:
        """A prompt, however long it is, or `BadRow` for each row of a source. Raises `DataError` for the source."""
        return self._read.prompts(source, 0, rows)

    def of_row(self, row: Row, source: str, index: int) -> Prompt | BadRow:
        """The same for the row of this number."""
        [prompt] = self._read.block([(index, row)], source, 0)
        return prompt

    def __call__(self, streamed_row: StreamedRow) -> tuple[Prompt | None, str]:
        """The prompt; or None, and why the row is left out: `rows_too_long` or `rows_bad`. Raises `DataError`."""
        [prompt] = self._read.block(
            [(streamed_row.index, streamed_row.row)], streamed_row.part.name, streamed_row.part.source
        )
        if isinstance(prompt, BadRow):
            if not self._skip_bad_rows:
                raise DataError(_stopped_by([prompt.reason]))
            return None, "rows_bad"
        if len(prompt.token_ids) > self._max_prompt_length:
            return None, "rows_too_long"
        return evolve(prompt, id=f"{streamed_row.part.prefix}{streamed_row.index}"), ""


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

    def prompts(
        self, source: str, number: int, rows: Iterable[Row | BadRow] | None = None
    ) -> Iterator[Prompt | BadRow]:
        """A prompt or `BadRow` for each row of the source, which has index `number` in the run. `rows` are its rows, if
        it has been opened already.
        """
        placed = enumerate(checked_rows(source, self.columns, rows))
        while block := list(islice(placed, _AT_A_TIME)):
            yield from self.block(block, source, number)

    def block(self, placed: Sequence[tuple[int, Row | BadRow]], source: str, number: int) -> Iterator[Prompt | BadRow]:
        """The same for a few rows, each with its place in the source."""
        rows: dict[int, tuple[Row, _Chat]] = {}
        bad: dict[int, BadRow] = {}
        for index, row in placed:
            try:
                rows[index] = self._chat(row, index, source)
            except DataError as error:
                bad[index] = BadRow(str(error))
        ids = self._tokenize({i: chat for i, (_, chat) in rows.items()}, source)
        for index, _ in placed:
            tokens = bad.get(index) or ids[index]
            if isinstance(tokens, BadRow):
                yield tokens
            else:
                yield self._prompt(*rows[index], tokens, f"{number}:{index}")

    def _chat(self, row: Row | BadRow, index: int, source: str) -> tuple[Row, _Chat]:
        if isinstance(row, BadRow):
            raise DataError(row.reason)
        full_row = answered(row, index, source, self.columns)
        task = full_row.get("env_class") or self.env_class
        if not isinstance(task, str):
            raise DataError(f"{place_of(source, index)} names no env_class, and environment.env_class gives no default")
        if self.refuses and (reason := self.refuses(task, extras_of(full_row, self.columns))):
            raise DataError(f"{place_of(source, index)} {reason}")
        messages = chat_of(full_row, index, source, self.columns)
        if is_table(source):
            messages = tuple(map(without_nulls, messages))
        if not self.rendered:
            return full_row, _Chat(messages)
        allowed = bool(full_row.get(ALLOW_DROPPED))
        try:
            if not allowed:
                refuse_media({key: value for key, value in full_row.items() if not isinstance(value, str)})
            return full_row, _Chat(messages, tools_in(full_row, source), allowed)
        except DataError as error:
            raise DataError(f"{place_of(source, index)}: {error}") from error

    def _tokenize(self, chats: Mapping[int, _Chat], source: str) -> dict[int, list[int] | BadRow]:
        """The tokens of each chat, or why it is bad."""
        bad_rows: dict[int, list[int] | BadRow] = {}
        texts: dict[int, str] = {}
        with bounded(template_name(self.tokenizer), len(chats)):
            texts |= self._texts_together(chats)
            for index, chat in chats.items():
                if index in texts:
                    continue
                try:
                    texts[index] = self._text(chat)
                except DataError as error:
                    bad_rows[index] = BadRow(f"{place_of(source, index)}: {error}")
        return bad_rows | self._encode(texts, source)

    def _texts_together(self, chats: Mapping[int, _Chat]) -> dict[int, str]:
        """The texts of chats that can be rendered in one call; none of them if the template refuses one."""
        indices = [index for index, chat in chats.items() if self.rendered and not chat.tools]
        try:
            texts = self.template.prompts([chats[index].messages for index in indices])
        except DataError:
            return {}
        return {index: text for index, text in zip(indices, texts, strict=True) if text is not None}

    def _text(self, chat: _Chat) -> str:
        if not self.rendered:
            return self.template.text(chat.messages)
        template = evolve(self.template, tools=chat.tools) if chat.tools else self.template
        return template.prompt(chat.messages, allow_dropped=chat.allow_dropped)

    def _encode(self, texts: Mapping[int, str], source: str) -> dict[int, list[int] | BadRow]:
        """Tokenize all texts at once, which is faster; one by one if the tokenizer refuses one of them."""
        try:
            return dict(zip(texts, encoded(self.tokenizer, [*texts.values()]), strict=True))
        except Exception:  # noqa: BLE001 - tokenizers raise whatever they like for a text that is not Unicode
            tokens: dict[int, list[int] | BadRow] = {}
        for index, text in texts.items():
            try:
                tokens[index] = text_tokens(self.tokenizer, text)
            except Exception as error:  # noqa: BLE001 - as above
                tokens[index] = BadRow(f"{place_of(source, index)}: the tokenizer refuses the prompt: {error}")
        return tokens

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
    tools = row.get("tools")
    if isinstance(tools, str) and tools.lstrip().startswith("["):
        tools = from_json(tools, "tools")
    if not isinstance(tools, list | tuple) or not all(map(tool_name, tools)):
        return ()
    return tuple(without_nulls(tools) if is_table(source) else tools)


NO_SOURCE = "default"
"""Name of the data source of rows that name none."""


def data_source_of(row: Row) -> str:
    """Name of the data source under which a row is reported."""
    source = row.get("data_source")
    return NO_SOURCE if is_null(source) or source == "" else str(source)


def _stopped_by(reasons: Sequence[str]) -> str:
    """The first reason, the number of other bad rows, and the places of the next ones."""
    others = len(reasons) - 1
    counted = f" ({others} more {'row is' if others == 1 else 'rows are'} bad)" if others else ""
    following = "".join(f"\n  {reason}" for reason in reasons[1:3])
    return f"{reasons[0]}{counted}; data.bad_rows = skip leaves such rows out{following}"
