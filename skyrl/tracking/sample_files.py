"""Files of a run's samples: a readable line for each sample, and numeric columns for every token.

    RUN/trajectories.jsonl           one line for each sample: `sample_records` in `jsonlines.py`
    RUN/tokens/step_000003.arrow     columns of every token: `token_file.py`

Both are written on a separate thread. A step's lines are written before its checkpoint, so a run that resumes can
truncate the files to it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate

import numpy as np

from skyrl.tracking.jsonlines import JsonLines, sample_record
from skyrl.tracking.recording import Computed, SampledBatch
from skyrl.tracking.token_file import COMPUTED, KeptGroup, TokenFiles
from skyrl.trajectory import TrajectoryGroup


class BackgroundWriter:
    """Runs jobs one after the other on one thread, which starts with the first job.

    After a job raises, no further job runs, so that no file has a gap, and every later call raises the same exception.
    The queue is unbounded: a run limits it to the samples of one step by awaiting `finished`.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Queue `job`. Raises the exception of an earlier job that failed."""
        if self._last is not None and self._last.done():
            self._last.result()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="skyrl-writer")
        self._last = self._thread.submit(_run_after, self._last, job)

    def finish(self) -> None:
        """Return once every job is done. Raises the exception of a job that failed."""
        if self._last is not None:
            self._last.result()

    async def finished(self) -> None:
        """Wait like `finish`, without blocking the event loop."""
        if self._last is not None:
            await asyncio.shield(asyncio.wrap_future(self._last))  # cancelling the wait does not cancel the writing

    def close(self) -> None:
        """Wait for every job, and end the thread. The exception of a failed job is raised by `finish`, not here."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _run_after(previous: Future[None] | None, job: Callable[[], None]) -> None:
    """Run `job`, unless the job before it failed: then raise that exception again."""
    if previous is not None:
        previous.result()
    job()


Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text."""


class SampleFiles(BackgroundWriter):
    """Both files of one run, and their writer. Awaiting `finished` limits unwritten data to one step."""

    def __init__(self, lines: JsonLines, tokens: TokenFiles) -> None:
        super().__init__()
        self.lines, self.tokens = lines, tokens

    def sink(self, decode: Decode, most: int) -> SampleSink:
        """Receiver of the samples of steps; at most `most` of each step are kept, -1 for all."""
        return SampleSink(self, decode, most)

    def forget_after(self, step: int) -> list[int]:
        """Delete the samples of later steps. Returns the steps that have lost lines: more samples have tokens."""
        self.finish()
        lines = self.lines.forget_after(step)
        return sorted(item for item in self.tokens.forget_after(step) if lines[item] < self.tokens.samples(item))


class SampleSink:
    """A `Sink` of traced steps: lines are written when a batch arrives, tokens when its step is computed."""

    def __init__(self, files: SampleFiles, decode: Decode, most: int) -> None:
        self._files, self._decode, self._most = files, decode, most
        self._pending: tuple[int, list[KeptGroup]] | None = None

    def keep(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Write the lines of a batch, in the background. Raises the error of an earlier write that failed."""
        self.write_uncomputed()
        kept = kept_groups(step, groups, self._most)
        self._pending = step, kept
        self._files.submit(partial(self._write_lines, step, kept))

    def write_sampled(self, step: int, sampled: SampledBatch) -> None:
        """Does nothing: the batch is passed to `keep`, which a subclass of the experiment may override."""

    def write_computed(self, computed: Computed) -> None:
        tensors = {name: computed.tensors[name].numpy() for name in COMPUTED if name in computed.tensors}
        self._write_tokens(tensors)

    def write_uncomputed(self) -> None:
        """Write the tokens of a step that was abandoned, without advantages."""
        self._write_tokens({})

    def _write_tokens(self, computed: Mapping[str, np.ndarray]) -> None:
        if self._pending is None:
            return
        step, kept = self._pending
        self._pending = None
        self._files.submit(partial(self._files.tokens.write, step, kept, computed, self._decode))

    def _write_lines(self, step: int, kept: Sequence[KeptGroup]) -> None:
        self._files.lines.extend(
            sample_record(step, number, item.group, trajectory, self._decode)
            for number, item in enumerate(kept)
            for trajectory in item.trajectories
        )


def kept_groups(step: int, groups: Sequence[TrajectoryGroup], most: int) -> list[KeptGroup]:
    """The groups of a step to keep, in their order, with `most` samples in total; -1 keeps all.

    They are drawn at random, seeded with the step, because an asynchronous batch begins with the groups that finished
    first, which are the short ones. One group may be kept in part.
    """
    rows = [sum(len(trajectory.token_rows) for trajectory in group.trajectories) for group in groups]
    first = list(accumulate(rows, initial=0))
    left = sum(len(group.trajectories) for group in groups) if most < 0 else most
    samples: dict[int, int] = {}
    for number in random.Random(step).sample(range(len(groups)), len(groups)):
        if left <= 0:
            break
        samples[number] = min(left, len(groups[number].trajectories))
        left -= samples[number]
    return [KeptGroup(group=groups[n], first_row=first[n], samples=samples[n]) for n in sorted(samples)]
