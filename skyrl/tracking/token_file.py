"""Numeric columns for every token of the trajectories that a run keeps: `RUN/tokens/step_000003.arrow`, one file per
step.

The format is Arrow's IPC file (Feather 2), which pyarrow, pandas, polars and DuckDB read, with buffers compressed with
zstd unless they are small. A record batch holds the rows of one group, so one group can be read without the others. A
row is one forward pass of the policy: a trajectory, or one of its turns if the trajectory has several rows. Columns:

    prompt_id, sample, turn    text, int32, int32: which row it is; `turn` counts the rows of a trajectory from 0
    prompt_ids                 list of int32
    response_ids               list of int32; each list below has as many entries
    loss_mask                  list of bool: the policy sampled the token
    weight_versions            list of int32
    rollout_logprobs           list of float32: under the engine, in nats, 0 where `loss_mask` is false
    rewards, advantages        list of float32, if the step got that far: as used in training
    old_logprobs, ref_logprobs, teacher_logprobs, values, returns
                               list of float32, if the run computes them: under the learner before the update, under
                               the reference model, under the teacher; of the critic

The schema's metadata holds `skyrl.version`, `skyrl.samples`, which is the number of samples, and `skyrl.pieces`: JSON,
text of each token id in the file on its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from skyrl.data.bounds import Expansion, size_of
from skyrl.errors import DataError
from skyrl.storage.atomic import atomic_file
from skyrl.trajectory import TokenRow, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "tokens"
"""Name of the folder with these files in the run folder."""

VERSION = 1
"""Version of the format. It rises when a reader of an older version would misread the columns."""

COMPUTED = ("rewards", "advantages", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "returns")
"""Columns that a step computes from its batch, under the names of `TrainingBatch`."""


_COMPRESSED_BYTES = 16 * 1024
"""Mean size of a record batch, in bytes, from which buffers are compressed: zstd does not shrink smaller ones."""


@frozen(kw_only=True)
class KeptGroup:
    """A group of which some samples are kept, with the position of its samples in the step's batch."""

    group: TrajectoryGroup
    first_row: int
    """Row of the batch at which its first sample begins."""

    samples: int
    """Number of samples that are kept, from the first."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The samples that are kept."""
        return self.group.trajectories[: self.samples]

    @property
    def rows(self) -> int:
        """Number of rows of the kept samples in the file."""
        return sum(len(trajectory.token_rows) for trajectory in self.trajectories)


@frozen(kw_only=True)
class TokenTable:
    """One group as read from the file: name of a column -> one entry for each row."""

    columns: Mapping[str, Sequence[Any]]
    pieces: Mapping[int, str] = field(factory=dict)
    """Text of each token id, decoded on its own."""


class TokenFiles:
    """The files of a run, one for each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pieces: dict[int, str] = {}

    def path(self, step: int) -> Path:
        """The file of a step, which may not exist."""
        return self.folder / f"step_{step:06}.arrow"

    def write(
        self,
        step: int,
        kept: Sequence[KeptGroup],
        computed: Mapping[str, np.ndarray],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Write the file of a step. `computed` has (B, L) arrays of the whole batch; `decode` turns ids into text.

        The file gets its final name when it is complete. Raises `OSError` if it cannot be written.
        """
        import pyarrow as pa

        if not kept:
            return
        rows = _rows(kept, computed)
        metadata = {
            "skyrl.version": str(VERSION),
            "skyrl.samples": str(sum(entry.samples for entry in kept)),
            "skyrl.pieces": json.dumps(self._pieces_of(rows, decode)),
        }
        is_large = rows.nbytes >= _COMPRESSED_BYTES * len(kept)
        options = pa.ipc.IpcWriteOptions(compression="zstd" if is_large else None, use_threads=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        schema = rows.schema.with_metadata(metadata)
        with (
            atomic_file(self.path(step), durable=False) as scratch,
            scratch.open("wb") as file,
            pa.ipc.new_file(file, schema, options=options) as writer,
        ):
            first = 0
            for item in kept:
                writer.write_batch(rows.slice(first, item.rows))
                first += item.rows

    def read(self, step: int, group: int) -> TokenTable | None:
        """The rows of the kept group with index `group` in a step, counted from 0; None if there are none. Raises
        `DataError`.
        """
        import pyarrow as pa

        path = self.path(step)
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                metadata = reader.schema.metadata or {}
                if metadata.get(b"skyrl.version") != str(VERSION).encode():
                    raise DataError(f"{path} does not have the format that this version reads")
                if not 0 <= group < reader.num_record_batches:
                    return None
                pieces = json.loads(metadata[b"skyrl.pieces"])
                batch = reader.get_batch(group)
                Expansion(str(path), path.stat().st_size).take(size_of(batch))
                return TokenTable(columns=batch.to_pydict(), pieces={int(key): text for key, text in pieces.items()})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def samples(self, step: int) -> int:
        """Number of samples in the file of a step, as far as it is known: 1 if the file does not say it."""
        import pyarrow as pa

        try:
            with pa.memory_map(str(self.path(step))) as source, pa.ipc.open_file(source) as reader:
                return int((reader.schema.metadata or {}).get(b"skyrl.samples", 1))
        except (OSError, ValueError, pa.ArrowException):
            return 1

    def forget_after(self, step: int) -> set[int]:
        """Drop the files of later steps, which will be written again, and files that a kill left incomplete.

        Returns the steps that have files.
        """
        kept = set()
        for path in self.folder.glob("*step_*"):
            number = path.stem.removeprefix("step_")
            if path.name.startswith(".") or (number.isdecimal() and int(number) > step):
                path.unlink()
            elif number.isdecimal():
                kept.add(int(number))
        return kept

    def _pieces_of(self, rows: pa.RecordBatch, decode: Callable[[Sequence[int]], str]) -> dict[int, str]:
        """Text of every token id in the rows, each decoded once per run."""
        columns = [rows.column(name).values.buffers()[1] for name in ("prompt_ids", "response_ids")]
        ids = np.unique(np.concatenate([np.frombuffer(column, np.int32) for column in columns])).tolist()
        self._pieces |= {token_id: _piece(token_id, decode) for token_id in ids if token_id not in self._pieces}
        return {token_id: self._pieces[token_id] for token_id in ids}


def _piece(token: int, decode: Callable[[Sequence[int]], str]) -> str:
    """Text of a token, decoded after another one: some tokenizers drop the leading space of a text."""
    single = decode([token])
    twice = decode([token, token])
    return twice.removeprefix(single) if twice.startswith(single) else single


def _rows(kept: Sequence[KeptGroup], computed: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """The rows of all groups, one group after the other."""
    import pyarrow as pa

    rows = [
        (trajectory, turn, row)
        for item in kept
        for trajectory in item.trajectories
        for turn, row in enumerate(trajectory.token_rows)
    ]
    ids = [entry.group.prompt.id.encode() for entry in kept for _ in range(entry.rows)]
    indices = [element.first_row + number for element in kept for number in range(element.rows)]
    steps = [row for *_, row in rows]
    columns: dict[str, pa.Array] = {
        "prompt_id": pa.StringArray.from_buffers(len(ids), pa.py_buffer(_offsets(ids)), pa.py_buffer(b"".join(ids))),
        "sample": _column(np.array([trajectory.sample_index for trajectory, *_ in rows], np.int32)),
        "turn": _column(np.array([turn for _, turn, _ in rows], np.int32)),
        "prompt_ids": _lists([np.asarray(row.prompt_ids, np.int32) for row in steps]),
        "response_ids": _lists([np.asarray(row.response_ids, np.int32) for row in steps]),
        "loss_mask": _lists([np.asarray(row.loss_mask, np.bool_) for row in steps]),
        "weight_versions": _lists([np.asarray(row.weight_versions, np.int32) for row in steps]),
        "rollout_logprobs": _lists([np.asarray(row.rollout_logprobs, np.float32) for row in steps]),
    }
    for name in COMPUTED:
        if name in computed:
            answers = zip(indices, steps, strict=True)
            columns[name] = _lists([_answer(computed[name], index, row) for index, row in answers])
    return pa.record_batch(columns)


def _answer(values: np.ndarray, number: int, row: TokenRow) -> np.ndarray:
    """The part of a batch's row that belongs to the answer, including tokens that the environment inserted."""
    first = len(row.prompt_ids)
    return values[number, first : first + len(row.response_ids)].astype(np.float32)


def _lists(values: Sequence[np.ndarray]) -> pa.Array:
    """A list array of these entries."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(_column(_offsets(values)), _column(np.concatenate(values)))


def _column(values: np.ndarray) -> pa.Array:
    """The values as an Arrow array, without a copy unless they are bools, which Arrow stores as bits. `pyarrow.array`
    and `to_numpy` would import pandas, which takes 38 MB.
    """
    import pyarrow as pa

    bits = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(bits)])


def _offsets(values: Sequence[Sized]) -> np.ndarray:
    """Offsets of an Arrow list: where each value begins, and where the last one ends, in their concatenation."""
    return np.cumsum([0, *map(len, values)], dtype=np.int32)
