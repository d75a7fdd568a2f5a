"""Recordings of a run: samples and computations of each step, exact enough to replay a step and to compare runs.

    recording/
        about.json                     format version, planned steps of the run, versions of packages
        step_000003.jsonl[.gz]         a header line, then one line for each group: `data/group_lines.py`
        step_000003.safetensors        the batch: tokens, mask, log-probabilities, rewards, advantages, (B, L) each
        step_000003.json               every update, and xxh3-128 of every weight after the step: written last

A step counts once its last file exists; files of a step that a killed run left incomplete are not read.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from cattrs import BaseValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from skyrl.data.bounds import Expansion
from skyrl.data.group_lines import SCHEMA, as_object, group_of
from skyrl.errors import DataError, RunError
from skyrl.processes.redaction import redacted_tree
from skyrl.storage.atomic import atomic_file, write_file
from skyrl.storage.modes import save_tensors
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree.files import stored_text
from skyrl.tree.syntax_errors import json_line_error

FOLDER = "recording"
"""Name of the folder in the run folder."""

_STEP = re.compile(r"step_(\d+)\..+")
_LAST = ".json"
"""Suffix of the file of a step that is written last."""


@frozen(kw_only=True)
class SampledBatch:
    """Input of the trainer in one step."""

    groups: tuple[TrajectoryGroup, ...]
    metrics: Mapping[str, float] = field(factory=dict)
    """Metrics of the groups that were dropped, replaced or left out to make the batch."""

    epoch: int = 0
    """Passes over the data that were complete when the step began."""


@frozen(kw_only=True)
class Update:
    """One optimizer step."""

    learner: str
    """Name of the learner: `policy` or `critic`."""

    metrics: Mapping[str, float]


@frozen(kw_only=True, eq=False)
class Computed:
    """Everything that the trainer computed in one step."""

    step: int
    tensors: Mapping[str, Tensor]
    """Tensors (B, L) under the names of `TrainingBatch`, in the order in which they are computed."""

    updates: tuple[Update, ...]
    weights: Mapping[str, Mapping[str, str]]
    """Learner -> name of a weight -> xxh3-128 of its bytes in float32, after the step."""


class Recording:
    """The recording of one run. Steps count from 1."""

    def __init__(self, folder: Path, *, compress: bool = False) -> None:
        """`compress` applies to writing; compressed and plain files can both be read."""
        self.folder = folder
        self._suffix = ".jsonl.gz" if compress else ".jsonl"

    def begin(self, about: Mapping[str, Any]) -> None:
        """Create the folder and store `about`, the description of the run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"schema": SCHEMA, **about}, indent=1)
            write_file(self.folder / "about.json", text + "\n", durable=False)
        except OSError as error:
            raise RunError(f"the recording {self.folder} cannot be written: {error.strerror or error}") from error

    def about(self) -> dict[str, Any]:
        """The description given to `begin`. Raises `DataError` if there is no recording, or its format is newer."""
        path = self.folder / "about.json"
        try:
            about: dict[str, Any] = json.loads(stored_text(path))
        except OSError:
            raise DataError(
                f"there is no recording in {self.folder}: a run writes one if trainer.recording is jsonl or jsonl.gz"
            ) from None
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}") from error
        if about.get("schema") != SCHEMA:
            raise DataError(f"{path} has format {about.get('schema')}, but this version reads format {SCHEMA}")
        return about

    def write_sampled(self, step: int, sampled: SampledBatch) -> None:
        """Write the batch of a step. Raises `RunError` if it cannot be written."""
        head = {"step": step, "epoch": sampled.epoch, "groups": len(sampled.groups), "metrics": _plain(sampled.metrics)}
        lines = [
            json.dumps(item, ensure_ascii=False) for item in (head, *map(redacted_tree, map(as_object, sampled.groups)))
        ]
        data = ("\n".join(lines) + "\n").encode()
        packed = gzip.compress(data, mtime=0) if self._suffix.endswith(".gz") else data
        try:
            for suffix in (_LAST, ".jsonl", ".jsonl.gz"):
                self._path(step, suffix).unlink(missing_ok=True)
            write_file(self._path(step, self._suffix), packed, durable=False)
        except OSError as error:
            raise RunError(f"the recording {self.folder} cannot be written: {error.strerror or error}") from error

    def write_computed(self, computed: Computed) -> None:
        """Write the computations of a step, after `write_sampled`. Raises `RunError` if they cannot be written."""
        path = self._path(computed.step, ".safetensors")
        record = {
            "step": computed.step,
            "tensors": list(computed.tensors),
            "updates": [{"learner": update.learner, **_plain(update.metrics)} for update in computed.updates],
            "weights": computed.weights,
        }
        try:
            write_tensors(path, computed.tensors)
            text = json.dumps(record, allow_nan=False) + "\n"
            write_file(self._path(computed.step, _LAST), text, durable=False)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the recording {self.folder} cannot be written: {error}") from error

    def steps(self) -> list[int]:
        """Numbers of the complete steps, ascending."""
        names = (_STEP.fullmatch(path.name) for path in self.folder.glob(f"step_*{_LAST}"))
        return sorted(int(name[1]) for name in names if name)

    def sampled(self, step: int) -> SampledBatch:
        """The batch of a step. Raises `DataError`, which names the file and line, if it is incomplete."""
        self._expect(step)
        plain = self._path(step, ".jsonl")
        path = plain if plain.is_file() else self._path(step, ".jsonl.gz")
        rows = list(_rows(path))
        try:
            head, *groups = rows
            if len(groups) != head["groups"]:
                raise DataError(f"{path} contains {len(groups)} of {head['groups']} groups: it is incomplete")
            return SampledBatch(
                groups=tuple(_group(path, number, row) for number, row in enumerate(groups, 2)),
                metrics={name: float(value) for name, value in head["metrics"].items()},
                epoch=head["epoch"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} does not begin with a valid header line") from error

    def computed(self, step: int) -> Computed:
        """The computed part of a recorded step. Raises `DataError`."""
        self._expect(step)
        path = self._path(step, _LAST)
        try:
            record = json.loads(stored_text(path))
            path = self._path(step, ".safetensors")
            tensors = load_file(path)
            return Computed(
                step=step,
                tensors={name: tensors[name] for name in record["tensors"]},
                updates=tuple(
                    Update(
                        learner=item["learner"],
                        metrics={name: float(value) for name, value in item.items() if name != "learner"},
                    )
                    for item in record["updates"]
                ),
                weights=record["weights"],
            )
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def forget_after(self, step: int) -> None:
        """Delete the recordings of later steps, which will be repeated."""
        for path in self.folder.glob("*step_*"):
            name = _STEP.match(path.name.removeprefix("."))  # a killed writer left a name with a dot
            if name and int(name[1]) > step:
                path.unlink()

    def _path(self, step: int, suffix: str) -> Path:
        return self.folder / f"step_{step:06}{suffix}"

    def _expect(self, step: int) -> None:
        if not self._path(step, _LAST).is_file():
            steps = self.steps()
            extent = f"it has the steps {steps[0]} to {steps[-1]}" if steps else "it is empty"
            raise DataError(f"step {step} is not in the recording {self.folder} ({extent})")


class BatchDump:
    """A `Sink` of traced steps that writes the tensors of each batch, for debugging: `global_step_<n>.safetensors`.

    Tensors are (B, L) under the names of `TrainingBatch`: tokens, mask, log-probabilities, rewards, advantages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_sampled(self, step: int, sampled: SampledBatch) -> None:
        """Does nothing: the samples are in the run's folder."""

    def write_computed(self, computed: Computed) -> None:
        """Write the batch. Raises `RunError` if it cannot be written."""
        path = self._folder / f"global_step_{computed.step}.safetensors"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_tensors(path, computed.tensors)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the batch of step {computed.step} cannot be written to {path}: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors of any shape to a safetensors file. Tensors that share memory, such as `old_logprobs` and
    `rollout_logprobs` with `algorithm.old_logprobs = "engine"`, are stored once under each name.

    Raises `OSError` or `SafetensorError` if the file cannot be written.
    """
    # safetensors refuses tensors of one memory, and those that are views with gaps
    apart = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    with atomic_file(path, durable=False) as scratch:
        save_tensors(apart, scratch)


def _rows(path: Path) -> Iterator[Any]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            expansion, pieces = Expansion(str(path), path.stat().st_size), []
            while piece := file.read(1 << 20):
                expansion.take(len(piece))
                pieces.append(piece)
            text = b"".join(pieces).decode()
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {json_line_error(error)}") from error


def _group(path: Path, number: int, row: Mapping[str, Any]) -> TrajectoryGroup:
    try:
        return group_of(row)
    except (BaseValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise DataError(f"{path}, line {number} is not a group of trajectories: {first}") from error


def _plain(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: value if isfinite(value) else str(value) for name, value in metrics.items()}
