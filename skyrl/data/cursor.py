"""A run's position in its prompts, and the batches that follow from it.

A sampler chooses the prompts of each batch (`skyrl.data.samplers`). One that follows rewards gets them through
`observe`, which keeps them until they are due: a batch is drawn with the rewards of exactly those draws that were made
more than `lag` batches before it, in the order of the draws. So what is drawn depends neither on which groups end first
nor on where a run was interrupted. Streamed rows have a cursor of their own, without random access.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Generic, Literal, cast

from typing_extensions import TypeVar

from skyrl.data.order import Order, Shuffled
from skyrl.data.prompt_facts import PromptFacts, facts_of
from skyrl.data.row_store import StoredRows
from skyrl.data.row_streams import RowStream, StreamedRow
from skyrl.data.samplers import Permutation, Sampler, Scored
from skyrl.data.stored_prompts import prompt_as_object, prompt_of_object
from skyrl.errors import DataError, ResumeError
from skyrl.trajectory import Prompt

Tail = Literal["drop", "carry", "short"]
"""Policy for the prompts of an epoch that do not fill a batch."""

T = TypeVar("T", default=Prompt)

Make = Callable[[StreamedRow], tuple[T | None, str]]
"""A row ready to train on; or None, and the name of the metric that counts rows which are left out for this reason."""


class PromptCursor(Generic[T]):
    """Hands out prompts in batches, epoch after epoch.

    By default, the order of an epoch depends only on (seed, epoch), so that a resumed run only needs the number of
    batches already taken. A `sampler` may have a state.
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
        parts: Mapping[str, str] | None = None,
        sampler: Sampler | None = None,
        lag: int = 0,
    ) -> None:
        """`batch_size` is a number of prompts and must not exceed the length of an epoch; without an `order`, prompts
        are shuffled; without a `sampler`, they follow the order.

        `fingerprint` is the prompts' fingerprint and `parts` their digests (see `PromptFacts`), if known; the former is
        required for rows that are not prompts, which have no parts. `lag` is the
        number of batches, besides the next, whose rewards the next one does not depend on.
        """
        self._prompts = prompts
        self._batch_size = batch_size
        self._order = order or Shuffled(len(prompts), seed)
        self._tail = tail
        self._fingerprint, self._known_parts = fingerprint, parts
        self._sampler = sampler or permutation(self._order, batch_size, tail)
        self._lag = lag * batch_size
        self._applied = 0
        self._scored: dict[int, Scored | None] = {}
        self._rows: dict[int, int] = {}  # of draws whose rewards have not been applied
        self.drawn = 0
        """Number of prompts drawn so far, if the sampler observes; otherwise 0."""

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
        drops = self._tail == "drop" and isinstance(self._sampler, Permutation)
        return self.epoch * (len(self._order) % self._batch_size) if drops else 0

    @property
    def is_ready(self) -> bool:
        """Whether the rewards that the next batch depends on are known."""
        return all(number in self._scored for number in range(self._applied, self._draws_to_score))

    @property
    def _draws_to_score(self) -> int:
        """Number of draws whose rewards the next batch depends on."""
        return max(self._applied, self.drawn - self._lag) if self._sampler.observes else 0

    def take(self) -> tuple[T, ...]:
        """The next batch. Rewards that it depends on and that are not known, of an abandoned step, are left out."""
        for number in range(self._applied, self._draws_to_score):
            scored = self._scored.pop(number, None)
            self._rows.pop(number, None)
            if scored is not None:
                self._sampler.observe(scored)
        self._applied = self._draws_to_score
        count = self._batch_size
        if self._tail == "short":
            start = self._position(self.batches_taken)
            count = min(count, (start // len(self._order) + 1) * len(self._order) - start)
        rows = self._sampler.draw(count, self.batches_taken)
        self.batches_taken += 1
        if self._sampler.observes:
            self._rows.update(enumerate(rows, self.drawn))
            self.drawn += len(rows)
        return tuple(self._prompts[row] for row in rows)

    def observe(self, number: int, rewards: Sequence[float]) -> None:
        """Keep the rewards of a draw, which is counted from 0, until they are due. Only the first rewards of a draw
        count; an empty sequence marks a draw without rewards.
        """
        if number in self._rows and number not in self._scored:
            self._scored[number] = Scored(self._rows[number], tuple(rewards)) if rewards else None

    def metrics(self) -> dict[str, float]:
        """Metrics of the sampler, and the number of prompts that no batch contains."""
        left_out = {"data/prompts_left_out": self.left_out} if self.left_out else {}
        return left_out | {f"curriculum/{name}": value for name, value in self._sampler.metrics().items()}

    def as_stored(self, prompts: Iterable[Prompt]) -> list[object]:
        """The ids of prompts that were taken, which a checkpoint stores."""
        return [prompt.id for prompt in prompts]

    def of_stored(self, ids: Sequence[object]) -> list[T]:
        """The prompts with these ids. Raises `KeyError` if one is missing."""
        if isinstance(self._prompts, StoredRows):
            return [self._prompts.by_id(str(name)) for name in ids]
        by_id = {cast(Prompt, prompt).id: prompt for prompt in self._prompts} if ids else {}
        return [by_id[str(name)] for name in ids]

    def _position(self, batches_taken: int) -> int:
        return position(batches_taken, len(self._order), self._batch_size, self._tail)

    def state(self) -> dict[str, Any]:
        """The position, as a checkpoint stores it."""
        state = {"batches_taken": self.batches_taken, "prompts": self.fingerprint, "parts": self._parts}
        own = self._sampler.state_dict()
        if not own and not self._sampler.observes:
            return state
        kept = [
            (number, row, number in self._scored, scored.rewards if (scored := self._scored.get(number)) else ())
            for number, row in self._rows.items()
        ]
        return state | {"sampler": own, "drawn": self.drawn, "applied": self._applied, "draws": kept}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the batches that `state` counts. Raises `ResumeError` if they were of other prompts, or drawn
        by another sampler.
        """
        if state["prompts"] != self.fingerprint:
            raise ResumeError(
                "the training data is not what it was when the checkpoint was saved: other rows, other columns in "
                f"them, in another order, or through another chat template. {self._describe_change(state.get('parts'))}"
                "Restore it, or start a new run in a new folder"
            )
        self.batches_taken = int(state["batches_taken"])
        self.drawn = self._applied = int(state.get("drawn", 0))
        self._rows, self._scored = {}, {}
        if "sampler" not in state:
            return
        self._applied = int(state["applied"])
        for number, row, is_scored, rewards in state["draws"]:
            self._rows[number] = row
            if is_scored:
                self.observe(number, rewards)
        try:
            self._sampler.load_state_dict(state["sampler"])
        except (KeyError, ValueError, TypeError) as error:
            raise ResumeError(
                "the checkpoint has the state of another sampler: keep the curriculum's samplers, or start a new run "
                "in a new folder"
            ) from error

    @cached_property
    def _parts(self) -> dict[str, str]:
        if self._known_parts is not None:
            return dict(self._known_parts)
        return dict(self._facts.parts) if isinstance(self._prompts[0], Prompt) else {}

    @cached_property
    def _facts(self) -> PromptFacts:
        return facts_of(cast(Sequence[Prompt], self._prompts))

    def _describe_change(self, stored: Mapping[str, str] | None) -> str:
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
        return self._facts.content if self._fingerprint is None else self._fingerprint


class StreamCursor(Generic[T]):
    """`PromptCursor` for streamed rows: batches pass after pass; a batch may end one pass and begin the next."""

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


def position(batches_taken: int, prompts: int, batch_size: int, tail: Tail) -> int:
    """Index of the next prompt in the concatenation of all epochs of `prompts` prompts, after so many batches."""
    if tail == "carry":
        return batches_taken * batch_size
    of_an_epoch, _ = batches(prompts, batch_size, 1, tail)
    epoch, batch = divmod(batches_taken, of_an_epoch)
    return epoch * prompts + batch * batch_size


def permutation(order: Order, batch_size: int, tail: Tail) -> Permutation:
    """The sampler that follows an order."""
    epoch = lru_cache(maxsize=2)(order.epoch)
    return Permutation(epoch, len(order), lambda step: position(step, len(order), batch_size, tail))


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


def ends_before(most: int | None, rows: int, batch_size: int, epochs: tuple[str, int], tail: Tail) -> str:
    """Warning about a number of steps that the data does not last for: `epochs` is the field of the number of epochs,
    and its value. Empty if `most` is None or is reached, or if there are no epochs to train for.
    """
    field, number = epochs
    steps, _ = batches(rows, batch_size, number, tail)
    if most is None or not steps or steps >= most:
        return ""
    return f"{steps} of the {most} steps: the data ends after {field} = {number} ({rows:,} rows / {batch_size:,})"
