"""All rows of a run's files, read before the run loads a tokenizer: how many there are, and which are bad.

`skyrl doctor` reads every file whole. `skyrl run`, which reads all rows once it has its tokenizer, does so before that
if it is quick.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import frozen

from skyrl.chats.masks import message_weights
from skyrl.config import SkyRLTrainConfig, SupervisedConfig
from skyrl.config.loading.kinds import reads_chats, reads_pairs
from skyrl.data.conversations import refuse_media, without_nulls
from skyrl.data.row_forms import chat_in, learns_all, preference_chat
from skyrl.data.sources import BadRow, Columns, Row, answered, chat_of, in_table, iterate_rows
from skyrl.errors import DataError, Problem

QUICK_BYTES = 32 * 2**20
"""Largest file that is read before a run starts: about a fifth of a second of reading."""

_SHOWN = 2
"""Number of bad rows whose reasons are given."""


@frozen(kw_only=True)
class Counted:
    """Rows of a file."""

    rows: int
    """Number of rows, bad ones included."""

    bad: tuple[str, ...] = ()
    """Reasons of the bad ones; each begins with the place of the row."""

    @property
    def good(self) -> int:
        """Number of rows that are not bad. Some may still be too long for the run."""
        return self.rows - len(self.bad)


Judge = Callable[[Row, int, str], None]
"""Reads a row, given its number from 0 and the name of its source. Raises `DataError` for a bad one."""


def count_rows(source: str, judge: Judge, *, whole: bool) -> Counted | None:
    """The rows of a file; None if they cannot be counted quickly and `whole` does not ask for it.

    Raises `DataError` for a file that cannot be read.
    """
    path = Path(source).expanduser()
    if not whole and os.path.getsize(path) > QUICK_BYTES:
        return Counted(rows=_rows_of_parquet(path)) if path.suffix == ".parquet" else None
    rows, bad = 0, []
    for row in iterate_rows(source):
        rows += 1
        try:
            if isinstance(row, BadRow):
                raise DataError(row.reason)
            judge(row, rows - 1, source)
        except DataError as error:
            bad.append(str(error))
    return Counted(rows=rows, bad=tuple(bad))


def _rows_of_parquet(path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def prompts_of(run: SkyRLTrainConfig) -> Judge:
    """Whether a row is a prompt with an answer and a task."""
    columns = Columns(prompt=run.data.prompt_column, answer=run.data.answer_column)

    def judge(row: Row, place: int, source: str) -> None:
        whole = answered(row, place, source, columns)
        chat_of(whole, place, source, columns)
        if not isinstance(whole.get("env_class") or run.environment.env_class, str):
            raise DataError(f"{source}, row {place} names no env_class, and environment.env_class gives no default")

    return judge


def supervised_rows_of(run: SupervisedConfig) -> Judge:
    """Whether a row is a chat with something to learn, or a pair of them. Rows of tokens and of plain text pass."""

    def judge(row: Row, place: int, source: str) -> None:
        row = without_nulls(row) if in_table(source) else row
        try:
            refuse_media(row)
            if reads_pairs(run):
                for key in (run.chosen_key, run.rejected_key):
                    preference_chat(row, key, run.prompt_key)
            elif reads_chats(run) and (chat := chat_in(row, run)) is not None:
                message_weights(chat, all_messages=learns_all(run))
        except DataError as error:
            raise DataError(f"{source}, row {place}: {error}") from error

    return judge


def bad_rows(counted: Counted, field: str, skip: str, *, skips: bool) -> Iterator[Problem]:
    """The problem of a file's bad rows. `skip` is the setting that leaves such rows out, as `path = value`; with
    `skips` it is on, and rows that are left out are a warning unless none remains.
    """
    if not counted.bad:
        return
    others = len(counted.bad) - _SHOWN
    more = f"; {others} more {'is' if others == 1 else 'are'} bad" if others > 0 else ""
    yield Problem(
        path=field,
        message="; ".join(counted.bad[:_SHOWN]) + more,
        hint=f"they are left out ({skip})" if skips else f"mend the row, or leave such rows out with {skip}",
        severity="warning" if skips and counted.good else "error",
    )


def too_few_rows(
    counts: Sequence[Counted | None], path: str, batch: int, noun: str, *, skips: bool, otherwise: str = ""
) -> Iterator[Problem]:
    """The problem of data that does not fill one batch, if all its rows are counted. `otherwise` is another remedy."""
    known = [each.good if skips else each.rows for each in counts if each is not None]
    if len(known) == len(counts) and sum(known) < batch:
        message = f"{batch} {noun}, but the training data has {sum(known)}"
        yield Problem(path=path, message=message, hint=f"lower it to {sum(known)} or less{otherwise}")
