"""Datasets as rows: parquet, Arrow, JSONL, JSON or CSV files, a Hugging Face dataset from a folder or the hub, a
folder of Harbor's tasks, or a task of reasoning-gym.

A row has SkyRL's columns: `prompt` (a chat: list of {"role", "content"}), and optionally `env_class`, `reward_spec`,
`data_source`, `extra_info`. Every other column goes to the environment as it is. `Columns` names the columns of prompt
and answer in other data. An invalid row is a `BadRow`, which the caller may skip or refuse.
"""

from __future__ import annotations

import csv
import io
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate, islice
from os.path import isdir  # false for a name that no folder can have, where Path.is_dir raises
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from skyrl.chats.contents import has_call_list, short
from skyrl.config.foundation.reasoning_tasks import SCHEME
from skyrl.data.arrow_files import ArrowTable
from skyrl.data.bounds import DEEPEST, ELEMENT_BYTES, LONGEST_LINE, Expansion, is_too_deep, size_of
from skyrl.data.data_files import DataFile, data_files, has_files
from skyrl.data.hugging_face import read_dataset
from skyrl.data.reasoning_rows import read_reasoning_rows
from skyrl.errors import DataError
from skyrl.tree.files import stored_text
from skyrl.tree.syntax_errors import json_line_error

if TYPE_CHECKING:
    import pyarrow as pa

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
    """Every row of one source in a list, as `checked_rows` reads it."""
    return list(checked_rows(source, columns))


def checked_rows(
    source: str, columns: Columns | None = None, rows: Iterable[Row | BadRow] | None = None
) -> Iterator[Row | BadRow]:
    """Every row of one source in turn: `.parquet`, `.arrow`, `.jsonl`, `.json` or `.csv` files (a path, an address such
    as `s3://bucket/rows.parquet`, or a pattern with `*`), a folder, a hub name, or a task of reasoning-gym. `rows` are
    those of the source, where it has been opened already.

    Raises `DataError` for a source that is missing, unreadable, empty, or without the columns.
    """
    columns, is_first = columns or Columns(), True
    for row in iterate_rows(source, columns) if rows is None else rows:
        if is_first and not isinstance(row, BadRow):
            _refuse_missing(source, list(row), columns)
            is_first = False
        yield row


def iterate_rows(source: str, columns: Columns | None = None) -> Iterator[Row | BadRow]:
    """Every row in turn, whatever its columns; only `.json` files are loaded into memory as a whole.

    In a parquet file, `columns` are checked even if it has no rows. Raises `DataError` as `read_rows` does.
    """
    rows: Iterable[Row | BadRow]
    if source.startswith(SCHEME):
        rows = read_reasoning_rows(source)
    elif has_files(source):
        rows = _read_files(data_files(source), columns)
    else:
        path = Path(source).expanduser()
        rows = read_tasks(path) if holds_tasks(path) else read_dataset(source)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{source} contains no rows")


def read_file(file: DataFile, columns: Columns | None = None, start: int = 0) -> Iterator[Row | BadRow]:
    """The rows of a file from the one with the number `start`, counted from 0."""
    match file.suffix:
        case ".parquet":
            return _read_parquet(file, columns, start)
        case ".jsonl":
            return _read_jsonl(file, start)
        case ".csv":
            return islice(_read_csv(file), start, None)
        case ".json":
            return islice(_read_json(file), start, None)
    if file.path is None:
        raise DataError(f"{file.location}: Arrow files are mapped into memory; copy it to a disk, or store parquet")
    return islice(ArrowTable([file.path]).rows(), start, None)


def _read_files(files: Sequence[DataFile], columns: Columns | None) -> Iterator[Row | BadRow]:
    kinds = ColumnKinds()
    for file in files:
        if len(files) > 1:
            kinds.add(file)
        yield from read_file(file, columns)


class ColumnKinds:
    """The kinds of values in the columns of several files, which have to be the same; a column may be missing."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, str]] = {}

    def add(self, file: DataFile) -> None:
        """Add the columns of a file: those of its schema, or of its first row. Raises `DataError` for another kind."""
        for name, kind in _kinds(file):
            before, location = self._seen.setdefault(name, (kind, file.location))
            if before != kind:
                raise DataError(
                    f"the column {name} has values of the kind {kind} in {file.location}, and {before} in {location}: "
                    "write the files again with the same types, or name them as sources of their own"
                )


def _kinds(file: DataFile) -> Iterator[tuple[str, str]]:
    if file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(file.path or file.open())
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(f"{file.location} cannot be read as parquet: {error}") from error
        for column in schema:
            if (kind := kind_of_type(column.type)) is not None:
                yield column.name, kind
        return
    row = next((row for row in read_file(file) if not isinstance(row, BadRow)), {})
    for name, value in row.items():
        if value is not None:
            yield name, kind_of_value(value)


def kind_of_value(value: object) -> str:
    """The kind of a value: text, number, list, ..."""
    names = {str: "text", bool: "yes or no", int: "number", float: "number", list: "list", dict: "table"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def kind_of_type(kind: pa.DataType) -> str | None:
    """The kind of the values of a column; None for one of nulls."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return kind_of_type(kind.value_type)
    if pa.types.is_null(kind):
        return None
    tests = {
        "text": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "yes or no": (pa.types.is_boolean,),
        "number": (pa.types.is_integer, pa.types.is_floating),
        "list": (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list),
        "table": (pa.types.is_struct,),
    }
    return next((name for name, any_of in tests.items() if any(test(kind) for test in any_of)), str(kind))


def first_row(source: str, columns: Columns, *, skip: bool = False) -> Row:
    """The first row of a file, with its answer; with `skip`, the first row that can be read.

    Raises `DataError` for a file that cannot be read, is empty, or lacks the columns, and for a bad row.
    """
    reason = f"{source} contains no rows"
    for index, row in enumerate(iterate_rows(source, columns)):
        if not isinstance(row, BadRow):
            _refuse_missing(source, list(row), columns)
            return answered(row, index, source, columns)
        reason = row.reason
        if not skip:
            break
    raise DataError(reason)


def is_table(source: str) -> bool:
    """Whether a source is a table, in which a null may stand for an absent value."""
    return DataFile(source).suffix not in (".json", ".jsonl")


def place_of(source: str, number: int) -> str:
    """Where a row of a source is, for messages: if the source has several files, the file, and the number there."""
    files: Sequence[DataFile] = ()
    before = 0
    with suppress(DataError):  # the files are away by now
        files = data_files(source) if has_files(source) else ()
    for file in files if len(files) > 1 else ():
        if number < before + (count := _rows_in(file)):
            return f"{file.location}, row {number - before}"
        before += count
    return f"{source}, row {number}"


@lru_cache(maxsize=4096)
def _rows_in(file: DataFile) -> int:
    """The number of rows of a file, which is counted once for all messages."""
    return sum(1 for _ in read_file(file))


_TEXT_HINT = (
    ". A prompt that is plain text needs a column with any other name: rename the column, and set data.prompt_column "
    "to the new name"
)


def chat_of(row: Row, number: int, source: str, columns: Columns | None = None) -> tuple[Mapping[str, Any], ...]:
    """The row's chat. Raises `DataError` with the row's number (from 0) if it has none."""
    column = (columns or Columns()).prompt
    prompt = row.get(column)
    prompt = _chat_in_text(prompt) if isinstance(prompt, str) and prompt.lstrip().startswith("[") else prompt
    if isinstance(prompt, str) and _IS_CHAT.match(prompt):
        raise DataError(
            f"{place_of(source, number)}: {column} is {short(prompt)}, which begins as a chat and is no JSON: write "
            "it with json.dumps"
        )
    if isinstance(prompt, str) and prompt and column != "prompt":
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise DataError(
            f"{place_of(source, number)}: {column} is {short(prompt)}, not a list of messages such as "
            "{'role': 'user', 'content': ...}" + (_TEXT_HINT if isinstance(prompt, str) and prompt else "")
        )
    messages: list[Any] = [_fill_content(message) for message in prompt]
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError(
                f"{place_of(source, number)}: the message {short(message)} needs the texts 'role' and 'content'"
            )
        if not has_call_list(message):
            raise DataError(
                f"{place_of(source, number)}: the message {short(message)} has tool_calls that are not a list of tables"
            )
    return tuple({key: value for key, value in message.items() if value is not None} for message in messages)


_IS_CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""A chat as text, in JSON or as Python prints it."""


def _chat_in_text(text: str) -> object:
    """The chat whose JSON the text is; the text itself, if it is another one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_chat = (
        isinstance(value, list) and value and all(isinstance(result, dict) and "role" in result for result in value)
    )
    return value if is_chat else text


def _fill_content(message: object) -> object:
    """The message; one with tool calls may lack a content, which is then empty."""
    if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content") is None:
        return {**message, "content": ""}
    return message


def answered(row: Row, number: int, source: str, columns: Columns) -> Row:
    """The row, with its answer as ground truth if its `reward_spec` has none. Raises `DataError` if it has neither."""
    spec = row.get("reward_spec")
    if columns.answer is None or not (spec is None or isinstance(spec, Mapping)):
        return row
    if spec is not None and not is_null(spec.get("ground_truth")):
        return row
    answer = answer_in(row, columns.answer)
    if answer is None:
        raise DataError(f"{place_of(source, number)}: {columns.answer} (data.answer_column) is missing")
    return {**row, "reward_spec": {"method": "rule", **(spec or {}), "ground_truth": answer}}


def answer_in(row: Row, column: str) -> object:
    """The ground truth in a column of answers: a number as text, and of a text the part after `####`, as in GSM8K,
    where a number loses its commas; None if there is none.
    """
    answer = row.get(column)
    if is_null(answer):
        return None
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, str):
        return answer
    _, mark, last = answer.rpartition("####")
    last = last.strip()
    return last.replace(",", "") if mark and _NUMBER_WITH_COMMAS.fullmatch(last) else last


def is_null(value: object) -> bool:
    """Whether a value of a row stands for none: null or NaN."""
    return value is None or (isinstance(value, float | Decimal) and value != value)


_NUMBER_WITH_COMMAS = re.compile(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")


def _refuse_missing(source: str, names: Sequence[Any], columns: Columns) -> None:
    required = {"prompt_column": columns.prompt} | ({"answer_column": columns.answer} if columns.answer else {})
    for field, column in required.items():
        if column not in names and not (field == "answer_column" and "reward_spec" in names):
            raise DataError(
                f"{source} has no column {column!r}; its columns are {', '.join(map(str, names))} (data.{field} sets "
                "which one to use)"
            )


def _read_parquet(data_file: DataFile, columns: Columns | None, start: int) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, remote = data_file.location, None if data_file.path else data_file.open()
    size = data_file.size() if remote is None else remote.seek(0, io.SEEK_END)
    try:
        with pq.ParquetFile(data_file.path or remote, pre_buffer=False) as file:
            if columns is not None:
                _refuse_missing(name, file.schema_arrow.names, columns)
            groups = list(map(file.metadata.row_group, range(file.metadata.num_row_groups)))
            pages = Expansion(name, size)
            for group in groups:
                values = sum(group.column(index).num_values for index in range(group.num_columns))
                pages.take(group.total_byte_size + ELEMENT_BYTES * values)
            ends = list(accumulate(group.num_rows for group in groups))
            first = bisect_right(ends, start)
            skipped = start - (ends[first - 1] if first else 0)
            expansion = Expansion(name, size)
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME, row_groups=range(first, len(groups))):
                expansion.take(size_of(batch))
                if skipped < len(batch):
                    yield from batch.slice(skipped).to_pylist()
                skipped = max(skipped - len(batch), 0)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{name} cannot be read as parquet: {error}") from error


def holds_tasks(folder: Path) -> bool:
    """Whether a folder contains folders of Harbor tasks: each has an `instruction.md` and a `task.toml`."""
    return isdir(folder) and next(_tasks(folder), None) is not None


def read_tasks(folder: Path) -> Iterator[Mapping[str, Any]]:
    """A row for each task, in the order of their names: the instruction as the user message, and the task's folder.

    Raises `DataError` for an instruction that cannot be read.
    """
    for task in sorted(_tasks(folder)):
        try:
            text = stored_text(task / "instruction.md")
        except (OSError, ValueError) as error:
            raise DataError(f"{task / 'instruction.md'} cannot be read: {error}") from error
        yield {
            "prompt": [{"role": "user", "content": text}],
            "harbor_task": str(task.absolute()),
            "data_source": folder.name,
        }


def _tasks(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if (path / "instruction.md").is_file() and (path / "task.toml").is_file())


def _read_csv(file: DataFile) -> Iterator[Row | BadRow]:
    """Rows under the names of the first line; an empty cell counts as absent."""
    csv.field_size_limit(LONGEST_CELL)
    try:
        with io.TextIOWrapper(file.open(), encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    yield BadRow(
                        f"{file.location}:{reader.line_num} has more or fewer cells than the first line has names"
                    )
                else:
                    yield {name: value or None for name, value in row.items()}
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{file.location} cannot be read as CSV: {error}") from error


def _read_jsonl(file: DataFile, start: int) -> Iterator[Row | BadRow]:
    try:
        with file.lines() as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{file.location}:{number} is longer than {LONGEST_LINE} bytes")
                if not line.strip():
                    continue
                if start:
                    start -= 1
                else:
                    yield _object(file.location, number, line)
    except OSError as error:
        raise DataError(f"{file.location} cannot be read: {error}") from error


def _object(path: str, number: int, line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        return BadRow(f"{path}:{number} is not JSON: {json_line_error(error)}")
    except RecursionError:
        return BadRow(f"{path}:{number} {_TOO_DEEP}")
    return _checked(row, f"{path}:{number}", "an object with columns as keys")


def _checked(row: object, place: str, expected: str) -> Row | BadRow:
    if is_too_deep(row):
        return BadRow(f"{place} {_TOO_DEEP}")
    return row if isinstance(row, dict) else BadRow(f"{place} is {short(row)}, not {expected}")


def _read_json(file: DataFile) -> list[Row | BadRow]:
    path = file.location
    try:
        with file.open() as opened:
            rows = json.loads(opened.read().decode())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise DataError(f"{path} {_TOO_DEEP}") from None
    if not isinstance(rows, list):
        raise DataError(f"{path} is not a list of objects")
    return [_checked(row, f"{path}, row {number}", "an object") for number, row in enumerate(rows)]
