"""Datasets as rows: parquet, Arrow, JSONL, JSON or CSV files, a Hugging Face dataset from a folder or the hub, or a
task of reasoning-gym.

A row has SkyRL's columns: `prompt` (a chat: list of {"role", "content"}), and optionally `env_class`, `reward_spec`,
`data_source`, `extra_info`. Every other column goes to the environment as it is. `Columns` names the columns of prompt
and answer in other data. An invalid row is a `BadRow`, which the caller may skip or refuse.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl.config.foundation.reasoning_tasks import SCHEME
from skyrl.data.arrow_files import ArrowTable
from skyrl.data.bounds import DEEPEST, ELEMENT_BYTES, LONGEST_LINE, Expansion, is_too_deep, size_of
from skyrl.data.harbor_tasks import holds_tasks, read_tasks
from skyrl.data.hugging_face import read_dataset
from skyrl.data.reasoning_rows import read_reasoning_rows
from skyrl.errors import DataError

Row = Mapping[str, Any]

ROWS_AT_A_TIME = 64
"""Number of rows of a parquet file that are in memory at the same time."""

_TOO_DEEP = f"is nested deeper than {DEEPEST} objects and lists"

LONGEST_CELL = 1 << 30
"""Largest number of characters of a cell of a CSV file."""


@frozen
class BadRow:
    """A row that cannot be a prompt."""

    reason: str
    """A sentence that begins with the place: the file, and the row in it, from 0."""


@frozen(kw_only=True)
class Columns:
    """Names of the columns to read. See `DataConfig`."""

    prompt: str = "prompt"
    answer: str | None = None


def read_rows(source: str, columns: Columns | None = None) -> list[Row | BadRow]:
    """Every row of one source: a `.parquet`, `.arrow`, `.jsonl`, `.json` or `.csv` file, a folder, a hub name, or a
    task of reasoning-gym.

    Raises `DataError` for a source that is missing, unreadable, empty, or without the columns.
    """
    columns = columns or Columns()
    rows = list(iterate_rows(source, columns))
    first = next((row for row in rows if not isinstance(row, BadRow)), None)
    if first is not None:
        _refuse_missing(source, list(first), columns)
    return rows


def iterate_rows(source: str, columns: Columns | None = None) -> Iterator[Row | BadRow]:
    """Every row in turn, whatever its columns; only `.json` files are loaded into memory as a whole.

    In a parquet file, `columns` are checked even if it has no rows. Raises `DataError` as `read_rows` does.
    """
    path = Path(source).expanduser()
    rows: Iterable[Row | BadRow]
    match path.suffix:
        case _ if source.startswith(SCHEME):
            rows = read_reasoning_rows(source)
        case ".parquet":
            rows = _read_parquet(_existing(path), columns)
        case ".jsonl":
            rows = _read_jsonl(_existing(path))
        case ".csv":
            rows = _read_csv(_existing(path))
        case ".json":
            rows = _read_json(_existing(path))
        case ".arrow":
            rows = ArrowTable([_existing(path)]).rows()
        case _:
            rows = read_tasks(path) if holds_tasks(path) else read_dataset(source)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{source} contains no rows")


FILES = (".parquet", ".arrow", ".jsonl", ".csv", ".json")
"""Suffixes of sources that are files."""


def first_row(source: str, columns: Columns, *, skip: bool = False) -> Row:
    """The first row of a file, with its answer; with `skip`, the first row that can be read.

    Raises `DataError` for a file that cannot be read, is empty, or lacks the columns, and for a bad row.
    """
    reason = f"{source} contains no rows"
    for place, row in enumerate(iterate_rows(source, columns)):
        if not isinstance(row, BadRow):
            _refuse_missing(source, list(row), columns)
            return answered(row, place, source, columns)
        reason = row.reason
        if not skip:
            break
    raise DataError(reason)


def in_table(source: str) -> bool:
    """Whether a source is a table, in which a null may stand for an absent value."""
    return not source.endswith((".json", ".jsonl"))


_TEXT_HINT = (
    ". A prompt that is plain text needs a column with any other name: rename the column, and set data.prompt_column "
    "to the new name"
)


def chat_of(row: Row, number: int, source: str, columns: Columns | None = None) -> tuple[Mapping[str, Any], ...]:
    """The row's chat. Raises `DataError` with the row's number (from 0) if it has none."""
    column = (columns or Columns()).prompt
    prompt = row.get(column)
    where = f"{source}, row {number}"
    if isinstance(prompt, str) and prompt and column != "prompt":
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise DataError(
            f"{where}: {column} is {_short(prompt)}, not a list of messages such as {{'role': 'user', 'content': ...}}"
            + (_TEXT_HINT if isinstance(prompt, str) and prompt else "")
        )
    given: list[Any] = [_with_content(message) for message in prompt]
    for message in given:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError(f"{where}: the message {_short(message)} needs the texts 'role' and 'content'")
    return tuple({key: value for key, value in message.items() if value is not None} for message in given)


def _with_content(message: object) -> object:
    """The message; one with tool calls may lack a content, which is then empty."""
    if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content") is None:
        return {**message, "content": ""}
    return message


def answered(row: Row, number: int, source: str, columns: Columns) -> Row:
    """The row, with its answer as ground truth if its `reward_spec` has none. Raises `DataError` if it has neither."""
    spec = row.get("reward_spec")
    if columns.answer is None or not (spec is None or isinstance(spec, Mapping)):
        return row
    if spec is not None and not is_missing(spec.get("ground_truth")):
        return row
    answer = answer_in(row, columns.answer)
    if answer is None:
        raise DataError(f"{source}, row {number}: {columns.answer} (data.answer_column) is missing")
    return {**row, "reward_spec": {"method": "rule", **(spec or {}), "ground_truth": answer}}


def answer_in(row: Row, column: str) -> object:
    """The ground truth in a column of answers: a number as text, and of a text the part after `####`, as in GSM8K,
    where a number loses its commas; None if there is none.
    """
    answer = row.get(column)
    if is_missing(answer):
        return None
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, str):
        return answer
    _, mark, last = answer.rpartition("####")
    last = last.strip()
    return last.replace(",", "") if mark and _NUMBER_WITH_COMMAS.fullmatch(last) else last


def is_missing(value: object) -> bool:
    """Whether a value of a row stands for none: null or NaN."""
    return value is None or (isinstance(value, float | Decimal) and value != value)


_NUMBER_WITH_COMMAS = re.compile(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")


def _existing(path: Path) -> Path:
    try:
        if path.is_file():
            return path
        reason = ""
    except OSError as error:  # a name of thousands of letters
        reason = f": {error.strerror}"
    raise DataError(f"there is no data file {str(path)[:500]}{reason}")


def _refuse_missing(source: str, there: Sequence[Any], columns: Columns) -> None:
    wanted = {"prompt_column": columns.prompt} | ({"answer_column": columns.answer} if columns.answer else {})
    for field, column in wanted.items():
        if column not in there and not (field == "answer_column" and "reward_spec" in there):
            raise DataError(
                f"{source} has no column {column!r}; its columns are {', '.join(map(str, there))} (data.{field} sets "
                "which one to use)"
            )


def _read_parquet(path: Path, columns: Columns | None) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if columns is not None:
                _refuse_missing(str(path), file.schema_arrow.names, columns)
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            pages = Expansion(path)
            for group in groups:
                values = sum(group.column(place).num_values for place in range(group.num_columns))
                pages.take(group.total_byte_size + ELEMENT_BYTES * values)
            expansion = Expansion(path)
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME):
                expansion.take(size_of(batch))
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _read_csv(path: Path) -> Iterator[Row | BadRow]:
    """Rows under the names of the first line; an empty cell counts as absent."""
    csv.field_size_limit(LONGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    yield BadRow(f"{path}:{reader.line_num} has more or fewer cells than the first line has names")
                else:
                    yield {name: value or None for name, value in row.items()}
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from error


def _read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
            if len(line) > LONGEST_LINE:
                raise DataError(f"{path}:{number} is longer than {LONGEST_LINE} bytes")
            if line.strip():
                yield _object(path, number, line)


def _object(path: Path, number: int, line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        return BadRow(f"{path}:{number} is not JSON: {error}")
    except RecursionError:
        return BadRow(f"{path}:{number} {_TOO_DEEP}")
    if is_too_deep(row):
        return BadRow(f"{path}:{number} {_TOO_DEEP}")
    if not isinstance(row, dict):
        return BadRow(f"{path}:{number} is {_short(row)}, not an object with columns as keys")
    return row


def _read_json(path: Path) -> list[Row | BadRow]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise DataError(f"{path} {_TOO_DEEP}") from None
    if not isinstance(rows, list):
        raise DataError(f"{path} is not a list of objects")
    return [_row_of_json(path, number, row) for number, row in enumerate(rows)]


def _row_of_json(path: Path, number: int, row: object) -> Row | BadRow:
    if is_too_deep(row):
        return BadRow(f"{path}, row {number} {_TOO_DEEP}")
    return row if isinstance(row, dict) else BadRow(f"{path}, row {number} is {_short(row)}, not an object")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
