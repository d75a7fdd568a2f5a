"""A run's position in its prompts, and the batches that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Generic, Literal, cast

from typing_extensions import TypeVar

from skyrl.data.order import Indices, Order, Shuffled
from skyrl.data.prompts import content_hash
from skyrl.errors import ResumeError
from skyrl.trajectory import Prompt

Tail = Literal["drop", "carry", "short"]
"""Policy for the prompts of an epoch that do not fill a batch."""

_PARTS = 32
"""Number of parts into which the data is hashed, so that a change can be located."""


T = TypeVar("T", default=Prompt)


class PromptCursor(Generic[T]):
    """Hands out prompts in batches, epoch after epoch.

    The order of an epoch depends only on (seed, epoch), so a resumed run only needs the number of batches already
    taken.
    """

    def __init__(
        self,
        prompts: Sequence[T],
        batch_size: int,
        seed: int,
        *,
        order: Order | None = None,
        tail: Tail = "drop",
        fingerprint: str | None = None,
    ) -> None:
        """`batch_size` is a number of prompts and must not exceed the length of an epoch; without an `order`, prompts
        are shuffled.

        `fingerprint` is the prompts' fingerprint, if known; it is required for rows that are not prompts.
        """
        self._prompts = prompts
        self._batch_size = batch_size
        self._order = order or Shuffled(len(prompts), seed)
        self._tail = tail
        self._fingerprint = fingerprint
        self._epoch = lru_cache(maxsize=2)(self._order.epoch)
        self.batches_taken = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, counted from 0."""
        return self.epoch_after(self.batches_taken)

    def epoch_after(self, batches_taken: int) -> int:
        """Epoch of the next prompt after `batches_taken` batches, counted from 0."""
        return self._position(batches_taken) // len(self._order)

    @property
    def left_out(self) -> int:
        """Number of prompts at the ends of epochs that were dropped so far."""
        return self.epoch * (len(self._order) % self._batch_size) if self._tail == "drop" else 0

    def take(self) -> tuple[T, ...]:
        """The next batch."""
        start = self._position(self.batches_taken)
        end = start + self._batch_size
        if self._tail == "short":
            end = min(end, (start // len(self._order) + 1) * len(self._order))
        self.batches_taken += 1
        return tuple(self._prompts[self._index(place)] for place in range(start, end))

    def _position(self, batches_taken: int) -> int:
        """Index of the next prompt in the concatenation of all epochs."""
        if self._tail == "carry":
            return batches_taken * self._batch_size
        of_an_epoch, _ = batches(len(self._order), self._batch_size, 1, self._tail)
        epoch, batch = divmod(batches_taken, of_an_epoch)
        return epoch * len(self._order) + batch * self._batch_size

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self._order))
        order: Indices = self._epoch(epoch)
        return int(order[place])

    def state(self) -> dict[str, Any]:
        """The position, as a checkpoint stores it."""
        return {"batches_taken": self.batches_taken, "prompts": self.fingerprint, "parts": self._parts}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the batches that `state` counts. Raises `ResumeError` if they were of other prompts."""
        if state["prompts"] != self.fingerprint:
            raise ResumeError(
                "the training data is not what it was when the checkpoint was saved: other rows, other columns in "
                f"them, in another order, or through another chat template. {self._what_changed(state.get('parts'))}"
                "Restore it, or start a new run in a new folder"
            )
        self.batches_taken = int(state["batches_taken"])

    @cached_property
    def _parts(self) -> dict[str, str]:
        """A digest for each range of consecutive prompts, named like `0 to 374`: at most 32 ranges in total."""
        if not isinstance(self._prompts[0], Prompt):
            return {}  # rows of another kind are compared as a whole
        size = -(-len(self._prompts) // _PARTS)
        prompts = cast(Sequence[Prompt], self._prompts)
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return {
            f"{size * number} to {size * number + len(part) - 1}": content_hash(part)[:16]
            for number, part in enumerate(parts)
        }

    def _what_changed(self, stored: Mapping[str, str] | None) -> str:
        if not stored:
            return ""
        before, now = (int(list(parts)[-1].split()[-1]) + 1 for parts in (stored, self._parts))
        if before != now:
            return f"There were {before} prompts, and now there are {now}. "
        changed = [name for name, digest in self._parts.items() if stored.get(name) != digest]
        more = f", and in {len(changed) - 1} more of {len(stored)} parts" if len(changed) > 1 else ""
        return f"Of {now} prompts, counted from 0, something differs among those from {changed[0]}{more}. "

    @property
    def fingerprint(self) -> str:
        """Digest of all prompts."""
        if self._fingerprint is None:
            self._fingerprint = content_hash(cast(Sequence[Prompt], self._prompts))
        return self._fingerprint


def batches_before(samples: int, prompts: int, batch_size: int, tail: Tail) -> int:
    """Largest number of batches with at most `samples` samples in total, over epochs of `prompts` prompts."""
    if tail != "short":
        return samples // batch_size
    epochs, rest = divmod(samples, prompts)
    return epochs * -(-prompts // batch_size) + rest // batch_size


def batches(prompts: int, batch_size: int, epochs: int, tail: Tail) -> tuple[int, int]:
    """Number of batches in `epochs` epochs of `prompts` prompts, and total number of prompts that are left out."""
    if tail == "carry":
        return divmod(epochs * prompts, batch_size)
    if tail == "short":
        return epochs * -(-prompts // batch_size), 0
    return epochs * (prompts // batch_size), epochs * (prompts % batch_size)
