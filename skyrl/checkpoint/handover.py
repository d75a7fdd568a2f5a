"""Weights of one model handed to another through files, however either is spread over its ranks."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen
from torch import Tensor

from skyrl.checkpoint.pieces import Piece, write_pieces
from skyrl.checkpoint.storage import Storage

FILE_BYTES = 1 << 30
"""As much is gathered in memory at a time, or one tensor that is larger."""


@frozen(kw_only=True)
class WeightFiles:
    """Stores whole weights in a folder, to be read as `StoredTensors`. It runs where they are gathered, so it can be
    pickled.
    """

    storage: Storage
    folder: str

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[str, ...]:
        """Names of the files. Raises `OSError` if they cannot be written."""
        files: list[str] = []
        held: list[Piece] = []
        for name, weight in weights:
            held.append(Piece.whole(f"model.{name}", weight).copied())
            if sum(piece.numbers.nbytes for piece in held) >= FILE_BYTES:
                files.append(self._write(held, len(files)))
                held = []
        return (*files, *([self._write(held, len(files))] if held else ()))

    def _write(self, held: list[Piece], number: int) -> str:
        return write_pieces(held, self.storage, self.folder, f"{number}.safetensors").name
