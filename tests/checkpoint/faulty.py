"""Checkpoints to save, and a storage that breaks at a chosen operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from skyrl.checkpoint.store import Checkpoint, CheckpointStore
from skyrl.storage.disk import Bytes, Disk, Storage


def checkpoint(step: int, **metrics: float) -> Checkpoint:
    """Two models whose every number is the step."""
    policy = {"model.weight": torch.full((5, 3), float(step)), "half": torch.full((3,), step, dtype=torch.bfloat16)}
    return Checkpoint(
        step=step,
        models={"policy": policy, "critic": {"model.weight": torch.full((2, 2), float(step))}},
        state={"trainer": {"version": step}},
        config={"trainer": {"seed": 1, "lr": 1e-06}},
        fingerprint="abc",
        metrics=metrics,
    )


def equals_checkpoint(loaded: Checkpoint | None, step: int) -> bool:
    """Down to the last number?"""
    expected = checkpoint(step)
    return (
        loaded is not None
        and (loaded.step, loaded.state, loaded.config) == (step, expected.state, expected.config)
        and loaded.models.keys() == expected.models.keys()
        and all(
            torch.equal(loaded.models[model][name], tensor)
            for model, tensors in expected.models.items()
            for name, tensor in tensors.items()
        )
    )


class Killed(BaseException):
    """The process ends here: nothing that handles errors sees it."""


class Breaking:
    """A storage whose operation number `at` raises `error`: `before` it does anything, `after` it has done it, or, of a
    write, after so many eighths of the bytes.
    """

    def __init__(self, inner: Storage, at: int, moment: str | int, error: BaseException) -> None:
        self._inner, self._at, self._moment, self._error = inner, at, moment, error
        self.done: list[str] = []
        """Operations that change something, in order."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in ("write", "move", "remove", "flush"):
            return attribute

        def changing(*arguments: Any) -> None:
            self.done.append(f"{name} {arguments[0]}")
            if len(self.done) != self._at:
                attribute(*arguments)
                return
            if isinstance(self._moment, int):
                if name == "write":  # the others are done or not
                    attribute(arguments[0], [torn(arguments[1], self._moment)])
            elif self._moment == "after":
                attribute(*arguments)
            raise self._error

        return changing


def torn(content: Sequence[Bytes], eighths: int) -> bytes:
    """The first eighths of it."""
    joined = b"".join(bytes(chunk) for chunk in content)
    return joined[: len(joined) * eighths // 8]


def store_that_breaks(
    folder: Path, at: int, moment: str | int, error: BaseException
) -> tuple[CheckpointStore, Breaking]:
    store = CheckpointStore(folder, keep=2)
    breaking = Breaking(Disk(folder), at, moment, error)
    store.storage = breaking
    return store, breaking


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def flip_a_bit(content: bytearray, at: int) -> None:
    content[at // 8] ^= 1 << at % 8


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "deleted": Path.unlink,
}
