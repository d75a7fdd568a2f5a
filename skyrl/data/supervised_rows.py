"""Rows of supervised training, tokenized: sequences with a mask, and pairs of chats. For their forms see
`row_forms.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import Any, Generic

import numpy as np
from attrs import asdict, define, evolve, field, frozen

from skyrl.chats.contents import Blanks
from skyrl.chats.masks import ChatMasks, Ids, Mask, Weights
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import RewardModelConfig, SFTConfig, SupervisedConfig
from skyrl.data.arrow_files import ArrowTable, arrow_table
from skyrl.data.conversations import without_inner_nulls
from skyrl.data.mapped_rows import MappedRows, row_of_tokens, tokens_of
from skyrl.data.row_forms import PreferenceForms, SupervisedForms, refuse_other_masks, tokenized_row
from skyrl.data.row_store import RowFolder, StoredRows, row_key, store_rows, with_length
from skyrl.data.row_streams import RowStream, StreamedRow
from skyrl.data.sources import BadRow, Row, iterate_rows, place_of
from skyrl.data.stored_distributions import stored_distributions
from skyrl.data.tokenized_rows import LikelyTokens, PreferenceRow, R, SupervisedRow
from skyrl.errors import DataError
from skyrl.processes.garbage import seldom_collected
from skyrl.tree import to_dict


@define
class Tally:
    """Counts of rows that were used, skipped or cut."""

    sizes: list[int] = field(factory=list)
    """Number of rows of each source that are trained on."""

    too_long: int = 0
    """Number of rows that were left out because they are longer than allowed."""

    cut: int = 0
    """Number of rows that were truncated."""

    bad_rows: list[str] = field(factory=list)
    """Reasons of the rows that were skipped."""

    turn_end: tuple[str, int | None] | None = None
    """The text that ends the turns of chats, and its token if it is a single one; None without chats."""

    behind_other_headers: int = 0
    """Number of chats whose answer does not follow the generation prompt."""

    empty_answers: int = 0
    """Number of answers without text, thoughts or tool calls: the model learns to end at once."""

    empty_prompts: int = 0
    """Number of rows whose prompt has no text."""

    def count(self, blanks: Blanks) -> None:
        """Set the numbers of empty prompts and answers."""
        self.empty_prompts, self.empty_answers = blanks.prompts, blanks.answers

    @property
    def blanks(self) -> Blanks:
        """Empty prompts and answers."""
        return Blanks(self.empty_prompts, self.empty_answers)


@frozen(kw_only=True)
class TokenizedRows(Generic[R]):
    """Rows in the order of their sources, and counts of the others."""

    rows: Sequence[R]
    tally: Tally
    digest: str | None = None
    """sha256 of all rows in order, if it is known."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each source."""
        return tuple(self.tally.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of all rows in order, and of the number of rows of each source."""
        rows = self.digest
        if rows is None:
            digest = sha256()
            for row in self.rows:
                digest.update(with_length(row.to_bytes()))
            rows = digest.hexdigest()
        return sha256(f"{rows} {list(self.sizes)}".encode()).hexdigest()


def load_supervised(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: SFTConfig, max_length: int
) -> TokenizedRows[SupervisedRow]:
    """Every row of the sources, tokenized and masked. Raises `DataError` for a bad row if `bad_rows` says so, and if no
    row is left.
    """
    reader = supervised_reader(sources, tokenizer, run, max_length)
    if run.tokenized_path is None:
        tables = [_table_of_tokens(source, run) for source in sources]
        if all(tables):
            return _mapped(reader, [table for table in tables if table is not None], len(tokenizer))
    return load_rows(reader, tokenizer, SupervisedRow)


def _table_of_tokens(source: str, run: SFTConfig) -> ArrowTable | None:
    """The table of a source whose rows are tokens; None for any other source."""
    table = arrow_table(source)
    if table is None or "input_ids" not in table.columns or {run.messages_key, "conversations"} & {*table.columns}:
        return None
    try:
        refuse_other_masks(table.columns)
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    return table


CHECKED_TOGETHER = 256
"""Number of mapped rows that are checked at a time: few, since their pages are in memory meanwhile."""


def _mapped(
    reader: RowReader[SupervisedRow], tables: Sequence[ArrowTable], vocabulary: int
) -> TokenizedRows[SupervisedRow]:
    """Rows of tokens, which stay in their files: each is checked once here, and read again when it is trained on.
    Where all rows of a slice are as they should be, no row is looked at alone.
    """
    digest, tally, cuts = sha256(), reader.tally, reader.run.too_long == "truncate"
    indices = [array("q") for _ in tables]
    for number, table in enumerate(tables):
        tally.sizes.append(0)
        for first, batch in table.slices(CHECKED_TOGETHER):
            tokens = tokens_of(batch, vocabulary)
            fits = np.zeros(0, np.bool_) if tokens is None else tokens.lengths <= reader.max_length
            if tokens is None or (cuts and not fits.all()):
                batch_rows = (row_of_tokens(table, index) for index in range(first, first + len(batch)))
                for row in reader.of_source(number, batch_rows, first):
                    digest.update(with_length(row.to_bytes()))
                    indices[number].append(int(row.id.partition(":")[2]))
                continue
            for data in compress(tokens.rows_as_bytes(), fits):
                digest.update(with_length(data))
            indices[number].extend((first + np.flatnonzero(fits)).tolist())
            tally.sizes[-1] += int(fits.sum())
            tally.too_long += int((~fits).sum())
    reader.finish()

    def read(raw_row: Row, row_id: str) -> SupervisedRow:
        row = reader.read(raw_row, row_id)
        return row if row.length <= reader.max_length else reader.cut(row) or row

    rows = MappedRows(tables, [np.asarray(table_indices) for table_indices in indices], read)
    return TokenizedRows(rows=rows, tally=reader.tally, digest=digest.hexdigest())


def supervised_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: SFTConfig, max_length: int
) -> RowReader[SupervisedRow]:
    """Reads rows as `load_supervised` does."""
    tokens_of = SupervisedForms(tokenizer, run)

    def read(row: Row, row_id: str) -> SupervisedRow:
        return _learned_row(row, row_id, tokens_of(row), run, len(tokenizer))

    def cut(row: SupervisedRow) -> SupervisedRow | None:
        weights = row.weights[:max_length]
        teacher = row.teacher and _select_tokens(row.teacher, slice(int((weights > 0).sum())))
        short = evolve(row, token_ids=row.token_ids[:max_length], weights=weights, teacher=teacher)
        return short if short.weights.any() else None

    def conclude(tally: Tally) -> None:
        tally.turn_end, tally.behind_other_headers = tokens_of.turn_end, tokens_of.behind_other_headers
        tally.count(tokens_of.blanks)

    return RowReader(run, tuple(sources), max_length, read, conclude, cut)


def row_of_token_ids(row: Row, run: SFTConfig, vocabulary: int) -> SupervisedRow:
    """A row of tokens, as `supervised_reader` reads it with a tokenizer of so many tokens. Raises `DataError`."""
    ids, mask = tokenized_row(row, vocabulary)
    return _learned_row(row, "", (ids, mask.astype(np.float32)), run, vocabulary)


def _learned_row(row: Row, row_id: str, tokens: tuple[Ids, Weights], run: SFTConfig, vocabulary: int) -> SupervisedRow:
    """The row with these tokens and weights. Raises `DataError` if nothing of it is learned."""
    ids, weights = tokens
    learned = np.flatnonzero(weights)
    weights[:1] = 0  # nothing predicts the first token
    if not weights.any():
        raise DataError("no token of it is learned")
    supervised_row = SupervisedRow(id=row_id, token_ids=ids, weights=weights)
    if not run.distillation.stored:
        return supervised_row
    teacher = stored_distributions(row, len(learned), vocabulary, at_most=run.distillation.top_k)
    return evolve(supervised_row, teacher=_select_tokens(teacher, learned > 0))


def count_blanks(masks: ChatMasks) -> Callable[[Tally], None]:
    """A conclusion that counts the empty prompts and answers among all that were tokenized."""
    return lambda tally: tally.count(masks.blanks)


def _select_tokens(teacher: LikelyTokens, selection: Mask | slice) -> LikelyTokens:
    return LikelyTokens(ids=teacher.ids[selection], logprobs=teacher.logprobs[selection])


def load_preferences(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: RewardModelConfig, max_length: int
) -> TokenizedRows[PreferenceRow]:
    """Every pair of the sources, tokenized. Raises `DataError` for a bad row if `bad_rows` says so, and if no pair is
    left.

    A pair that is too long is never truncated, because its score is read at the end.
    """
    return load_rows(preference_reader(sources, tokenizer, run, max_length), tokenizer, PreferenceRow)


def preference_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: RewardModelConfig, max_length: int
) -> RowReader[PreferenceRow]:
    """Reads pairs as `load_preferences` does."""
    tokens_of = PreferenceForms(tokenizer, run)

    def read(row: Row, row_id: str) -> PreferenceRow:
        chosen, rejected, margin = tokens_of(row)
        return PreferenceRow(id=row_id, chosen=chosen, rejected=rejected, margin=margin)

    return RowReader(run, tuple(sources), max_length, read, count_blanks(tokens_of.masks))


@seldom_collected()
def load_rows(reader: RowReader[R], tokenizer: ChatTokenizer, kind: type[R]) -> TokenizedRows[R]:
    """Load the rows into memory, or into a folder, which is reused if an earlier run has written the same rows."""
    run = reader.run
    if run.tokenized_path is None:
        return TokenizedRows(rows=tuple(reader.rows()), tally=reader.tally)
    settings = {"longest": reader.max_length, "rows": kind.__name__}
    key = row_key(reader.sources, tokenizer, {**reading_settings(run), **settings})
    folder = RowFolder(run.tokenized_path, key)
    about = folder.about()
    if about is None:

        def fill(scratch: Path) -> dict[str, Any]:
            digest = store_rows(scratch, ((row.id, row.to_bytes()) for row in reader.rows()))
            return {"digest": digest, "tally": asdict(reader.tally)}

        about = folder.fill(fill)
    tally = Tally(**about["tally"])
    end = tally.turn_end
    tally.turn_end = None if end is None else (end[0], end[1])
    return TokenizedRows(rows=StoredRows[R](folder.path, kind.of_bytes), tally=tally, digest=about["digest"])


READ_BY = (
    *("kind", "chat_template_kwargs", "tools_key", "system_key", "train_on_what", "messages_key"),
    *("chosen_key", "rejected_key", "prompt_key", "margin_key", "completion_key", "label_key", "bad_rows", "too_long"),
    *("num_answers", "answers_key", "ranks_key", "scores_key"),
)
"""Fields of a run that affect how rows are read, besides the sources and the tokenizer."""


def reading_settings(run: SupervisedConfig) -> dict[str, Any]:
    """The settings that affect how rows are read: tokenized rows on disk, and streams, belong to one set of them."""
    fields = to_dict(run)
    settings = {name: value for name, value in fields.items() if name in READ_BY}
    teacher = fields.get("distillation", {})
    if teacher.get("stored"):
        settings["teacher_top_k"] = teacher["top_k"]
    return settings


@frozen
class RowReader(Generic[R]):
    """Reads the rows of all sources in turn, once, and counts those that are left out."""

    run: SupervisedConfig
    sources: tuple[str, ...]
    max_length: int
    read: Callable[[Row, str], R]
    conclude: Callable[[Tally], None]
    cut: Callable[[R], R | None] = lambda row: None
    tally: Tally = field(factory=Tally)

    def rows(self, found_in: Iterable[Iterable[Row | BadRow]] | None = None) -> Iterator[R]:
        """The rows that are trained on. `found_in` are those of each source, where they have been opened already.
        Raises `DataError` at the end if there was none.
        """
        for number, source_rows in enumerate(found_in or map(iterate_rows, self.sources)):
            self.tally.sizes.append(0)
            yield from self.of_source(number, source_rows)
        self.finish()

    def of_source(self, number: int, rows: Iterable[Row | BadRow], first: int = 0) -> Iterator[R]:
        """The rows of a source that are trained on; `first` is the index of the first row in the source."""
        for index, raw_row in enumerate(rows, first):
            row = self._row(raw_row, self.sources[number], number, index)
            short = self.shortened(row) if row is not None else None
            if short is not None:
                self.tally.sizes[-1] += 1
                yield short

    def finish(self) -> None:
        """All rows have been read. Raises `DataError` if none of them is trained on."""
        tally = self.tally
        self.conclude(tally)
        if not sum(tally.sizes):
            long = f"{tally.too_long} are longer than max_length = {self.max_length} tokens" if tally.too_long else ""
            bad = f"{len(tally.bad_rows)} are bad; the first: {tally.bad_rows[0]}" if tally.bad_rows else ""
            reason = ", and ".join(filter(None, (long, bad)))
            raise DataError(f"no row of {', '.join(self.sources)} can be trained on: {reason}")

    def streamed(self, streamed_row: StreamedRow) -> tuple[R | None, str]:
        """A streamed row that is trained on; or None, and why it is left out: `rows_too_long` or `rows_bad`. Raises
        `DataError`.
        """
        self.tally.bad_rows.clear()  # they are counted by whoever asks
        row = self._row(streamed_row.row, streamed_row.part.name, streamed_row.part.source, streamed_row.index)
        if row is None:
            return None, "rows_bad"
        short = self.shortened(row)
        return (None, "rows_too_long") if short is None else (short, "")

    def first(self, rows: RowStream, count: int) -> TokenizedRows[R]:
        """Rows among the first `count` of a stream that are trained on. Raises `DataError`, also without any."""
        kept: list[R] = []
        for _ in range(count):
            streamed_row = rows.draw()
            if rows.passes:
                break
            row, _ = self.streamed(streamed_row)
            kept += [] if row is None else [row]
        if not kept:
            raise DataError(f"none of the first {count} rows of {', '.join(self.sources)} can be trained on")
        tally = Tally(sizes=[len(kept)])
        self.conclude(tally)
        return TokenizedRows(rows=tuple(kept), tally=tally)

    def _row(self, raw_row: Row | BadRow, source: str, number: int, index: int) -> R | None:
        """The row as tokens; None for a bad row that may be skipped."""
        try:
            if isinstance(raw_row, BadRow):
                raise DataError(raw_row.reason)
            return self.read_full(raw_row, source, f"{number}:{index}")
        except DataError as error:
            reason = str(error) if isinstance(raw_row, BadRow) else f"{place_of(source, index)}: {error}"
            if self.run.bad_rows == "stop":
                raise DataError(f"{reason} (bad_rows = skip leaves such rows out, and counts them)") from error
            self.tally.bad_rows.append(reason)
            return None

    def read_full(self, raw_row: Row, source: str, row_id: str) -> R:
        """The row of a source as tokens, however long it is. Raises `DataError`."""
        return self.read(without_inner_nulls(raw_row, source), row_id)

    def shortened(self, row: R) -> R | None:
        """The row; if it is too long, its beginning or None, as `too_long` says."""
        if row.length <= self.max_length:
            return row
        short = self.cut(row) if self.run.too_long == "truncate" else None
        self.tally.too_long += short is None
        self.tally.cut += short is not None
        return short
