"""Datasets as rows: parquet, JSONL or JSON files, or a dataset of the Hugging Face hub.

A row has SkyRL's columns: `prompt` (a chat: list of {"role", "content"}), and optionally `env_class`, `reward_spec`,
`data_source`, `extra_info`. Every other column goes to the environment as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl.errors import DataError

Row = Mapping[str, Any]


def read_rows(source: str) -> list[Row]:
    """Every row of one source: a `.parquet`, `.jsonl` or `.json` file, or a hub name (`name` or `name:split`).

    Raises `DataError` for a file that is missing, unreadable, empty, or without the column `prompt`.
    """
    path = Path(source).expanduser()
    match path.suffix:
        case ".parquet":
            rows = _read_parquet(_existing(path))
        case ".jsonl":
            rows = list(_read_jsonl(_existing(path)))
        case ".json":
            rows = _read_json(_existing(path))
        case _:
            rows = _read_hub(source)
    if not rows:
        raise DataError(f"{source} holds no rows")
    if "prompt" not in rows[0]:
        raise DataError(f"{source} has no column 'prompt'; its columns are {', '.join(map(str, rows[0]))}")
    return rows


def chat_of(row: Row, number: int, source: str) -> tuple[Mapping[str, str], ...]:
    """The row's chat. Raises `DataError` with the row's number (from 0) if it is not a list of role and content."""
    prompt = row.get("prompt")
    where = f"{source}, row {number}"
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise DataError(
            f"{where}: prompt is {_short(prompt)}, not a list of messages such as {{'role': 'user', 'content': ...}}"
        )
    for message in prompt:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError(f"{where}: the message {_short(message)} needs the texts 'role' and 'content'")
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"there is no data file {path}")
    return path


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[Row] = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    return rows or _refuse_missing_prompt(path, pq.read_schema(path).names)


def _refuse_missing_prompt(path: Path, columns: Sequence[str]) -> list[Row]:
    if "prompt" not in columns:
        raise DataError(f"{path} has no column 'prompt'; its columns are {', '.join(columns)}")
    return []


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(path, number, line)


def _object(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number} is {_short(row)}, not an object with the key 'prompt'")
    return row


def _read_json(path: Path) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} is not a list of objects")
    return rows


def _read_hub(source: str) -> list[Row]:
    name, _, split = source.partition(":")
    if "/" not in name or name.startswith((".", "/", "~")):
        raise DataError(
            f"{source} is neither a .parquet, .jsonl or .json file nor a hub dataset (owner/name or owner/name:split)"
        )
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"{source} is a hub dataset: reading it needs `pip install datasets`") from None
    try:
        return list(load_dataset(name, split=split or "train"))
    except Exception as error:
        raise DataError(f"the hub dataset {source} cannot be loaded: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
