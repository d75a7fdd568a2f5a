"""A run's position in streamed rows, and the batches that follow from it: `PromptCursor` without random access."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic

from typing_extensions import TypeVar

from skyrl.data.row_streams import RowStream, StreamedRow
from skyrl.data.stored_prompts import prompt_as_object, prompt_of_object
from skyrl.errors import DataError, ResumeError
from skyrl.trajectory import Prompt

T = TypeVar("T", default=Prompt)

Make = Callable[[StreamedRow], tuple[T | None, str]]
"""A row ready to train on; or None, and the name of the metric that counts rows which are left out for this reason."""


class StreamCursor(Generic[T]):
    """Hands out rows in batches, pass after pass; a batch may end one pass and begin the next."""

    drawn = 0
    """Rewards change nothing about which rows come next: draws are not counted."""

    is_ready = True

    def __init__(self, stream: RowStream, make: Make[T], batch_size: int, fingerprint: str) -> None:
        """`fingerprint` is that of the sources and of how rows are read."""
        self._stream, self._make, self._batch_size, self._fingerprint = stream, make, batch_size, fingerprint
        self._left_out: dict[str, int] = {}
        self._ends: list[int] = []  # for each complete pass, the number of batches taken when its last row was
        self.batches_taken = 0

    @property
    def epoch(self) -> int:
        """Pass of the next row, counted from 0."""
        return self._stream.passes

    def epoch_after(self, batches_taken: int) -> int:
        """Pass of the next row after `batches_taken` batches, counted from 0."""
        return bisect_right(self._ends, batches_taken)

    def take(self) -> tuple[T, ...]:
        """The next batch. Raises `DataError` for a bad row, and if no row of a whole pass can be used."""
        batch: list[T] = []
        last_use = self._stream.passes
        while len(batch) < self._batch_size:
            before = self._stream.passes
            row = self._stream.draw()
            self._ends += [self.batches_taken + 1] * (self._stream.passes - before)
            example, reason = self._make(row)
            if example is not None:
                batch.append(example)
                last_use = self._stream.passes
                continue
            self._left_out[reason] = self._left_out.get(reason, 0) + 1
            if self._stream.passes > last_use + 1:
                counts = ", ".join(f"{count} {name}" for name, count in self._left_out.items())
                raise DataError(f"no row of the sources can be trained on ({counts}); `skyrl data inspect` says why")
        self.batches_taken += 1
        return tuple(batch)

    def observe(self, number: int, rewards: Sequence[float]) -> None:
        """Does nothing."""

    def metrics(self) -> dict[str, float]:
        """Numbers of rows that were left out so far."""
        return {f"data/{name}": float(count) for name, count in self._left_out.items()}

    def as_stored(self, prompts: Iterable[T]) -> list[object]:
        """Prompts that were taken, as a checkpoint stores them for `of_stored`: whole, because no id finds them."""
        return [prompt_as_object(prompt) for prompt in prompts if isinstance(prompt, Prompt)]

    def of_stored(self, stored: Sequence[object]) -> list[Prompt]:
        """The rows that `as_stored` stored."""
        return [prompt_of_object(item) for item in stored]

    def state(self) -> dict[str, Any]:
        """The position, as a checkpoint stores it."""
        return {
            "batches_taken": self.batches_taken,
            "prompts": self._fingerprint,
            "stream": self._stream.state(),
            "left_out": dict(self._left_out),
            "passes_end": list(self._ends),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that `state` counts. Raises `ResumeError` if they were not of this stream."""
        if "stream" not in state:
            raise ResumeError(
                "the checkpoint is of a run that loaded its data (data.streaming = false): keep it so, or start a new "
                "run in a new folder"
            )
        if state["prompts"] != self._fingerprint:
            raise ResumeError(
                "the streamed data is not what it was when the checkpoint was saved: other files, or other settings of "
                "how they are read (columns, chat template, shuffle_buffer_size, seed). Restore them, or start a new "
                "run in a new folder"
            )
        self.batches_taken = int(state["batches_taken"])
        self._left_out = {str(name): int(count) for name, count in state["left_out"].items()}
        self._ends = [int(end) for end in state["passes_end"]]
        self._stream.load_state(state["stream"])
