"""Makers of data sets: rows of a public data set in the form that an environment reads.

`MAKERS` lists them for `skyrl data make`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from skyrl.data.sources import BadRow, Row, iterate_rows, place_of
from skyrl.errors import DataError, UserError
from skyrl.storage.atomic import write_files
from skyrl.tree.names import nearest


@frozen
class Maker:
    """One data set."""

    sources: Mapping[str, str]
    """Name of a part -> its source, by default."""

    rows: Callable[[str], Iterator[Row]]
    """The rows of a source. Raises `DataError`."""


INSTRUCTION = 'Let\'s think step by step, and write the final answer behind "####".'


def gsm8k_rows(source: str) -> Iterator[Row]:
    """Questions with the form that the environment `gsm8k` reads, and the right number; `source` has rows with the
    texts `question` and `answer`, of which the number stands behind `####`.
    """
    for number, row in enumerate(iterate_rows(source)):
        if isinstance(row, BadRow):
            raise DataError(row.reason)
        if "question" not in row or "####" not in str(row.get("answer")):
            raise DataError(f"{place_of(source, number)}: no question, or no number behind #### in its answer")
        yield {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
            "reward_spec": {"ground_truth": str(row["answer"]).rpartition("####")[2].strip().replace(",", "")},
        }


MAKERS: Mapping[str, Maker] = {
    "gsm8k": Maker({"train": "openai/gsm8k:main:train", "test": "openai/gsm8k:main:test"}, gsm8k_rows),
}
"""Name of a data set -> how it is made."""


def make_files(name: str, folder: Path, overrides: Sequence[str]) -> dict[str, int]:
    """Write each part of a data set to `folder`, and return the number of rows of each file. `overrides` are sources in
    place of the default ones, as `part=source`. Raises `UserError` for an unknown name or part, and `DataError`.
    """
    maker = MAKERS.get(name)
    if maker is None:
        near = nearest(name, tuple(MAKERS))
        meant = f" (did you mean {near}?)" if near else ""
        raise UserError(f"there is no maker of {name!r}{meant}; available: {', '.join(MAKERS)}")
    sources = dict(maker.sources)
    for value in overrides:
        part, equals, source = value.partition("=")
        if not equals or not source or part not in sources:
            raise UserError(f"--source {value}: write one of {', '.join(f'{known}=SOURCE' for known in sources)}")
        sources[part] = source
    parts = {part: list(maker.rows(source)) for part, source in sources.items()}
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{part}.jsonl": rows for part, rows in parts.items()}
    write_files({file: "".join(f"{json.dumps(row)}\n" for row in rows) for file, rows in files.items()})
    return {str(file): len(rows) for file, rows in files.items()}
