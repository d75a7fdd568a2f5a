"""Schedules jobs into the decoding batch: the asyncio half of the torch engine.

    complete(jobs) --> waiting --> batch, on a thread of its own --> each job's future

Waiting jobs join in the order they came, as soon as all samples of the first one fit. Nothing here touches a tensor.

    paused             no waiting job joins; running ones are finished
    paused and frozen  running jobs stand still between two tokens, in the batch; `requeue` makes them wait again
    closed             running jobs are finished, frozen ones too; waiting and later ones fail

The batch belongs to the decoding thread while `_turn` awaits it. It learns from `is_interrupted`, before every step,
that the event loop has something for it: a job to join or to leave, a freeze, or another batch in its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from skyrl.errors import RunError
from skyrl.inference.torch.decode_batch import DecodeBatch, Job


class Scheduler:
    """Runs jobs to completion. Belongs to one event loop at a time."""

    def __init__(self, new_batch: Callable[[], DecodeBatch], *, max_rows: int, one_job_at_a_time: bool) -> None:
        """`max_rows` is the largest number of samples in flight, and in a job. With `one_job_at_a_time`, jobs never
        share a batch.
        """
        self._new_batch, self._max_rows, self._alone = new_batch, max_rows, one_job_at_a_time
        self._batch = new_batch()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._futures: dict[Job, asyncio.Future[None]] = {}
        self._abandoned: set[Job] = set()
        """Jobs whose callers have gone."""
        self._paused = self._frozen = self._closed = False
        self._runner: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-engine")

    @property
    def idle(self) -> bool:
        """Whether the scheduler is paused and nothing is running."""
        return self._paused and (self._runner is None or self._runner.done())

    @property
    def waiting(self) -> int:
        """Number of samples in jobs that have not joined the batch."""
        return sum(len(job.keys) for job in self._waiting)

    async def complete(self, jobs: Sequence[Job]) -> None:
        """Returns when every job is done. Raises the error that stopped the batch of one of them."""
        if self._closed:
            raise RunError("this inference engine was closed")
        loop = asyncio.get_running_loop()
        futures = {job: loop.create_future() for job in jobs}
        self._futures.update(futures)
        self._waiting.extend(jobs)
        self._start()
        try:
            await asyncio.gather(*futures.values())
        finally:
            for job in jobs:
                del self._futures[job]
            self._abandoned.update(job for job in jobs if not job.done)

    async def pause(self, *, freeze: bool = False) -> None:
        """Lets no waiting job join and returns when nothing is running: jobs are done or, with `freeze`, stopped
        between two tokens.
        """
        self._paused, self._frozen = True, freeze
        while self._runner is not None and not self._runner.done():
            await asyncio.wait([self._runner])

    def resume(self) -> None:
        """Lets jobs join again."""
        self._paused = self._frozen = False
        self._start()

    def requeue(self) -> None:
        """Puts frozen jobs, with their tokens so far, back in front of the waiting ones. Call it only while idle."""
        self._batch.interrupt()
        self._waiting.extendleft(reversed(self._running))
        self._running = []

    def fail_all(self, error: Exception) -> None:
        """Fails every job, frozen or waiting. Call it only while idle."""
        self._start_over(error)
        self._fail(self._waiting, error)
        self._waiting.clear()

    def set_weights_version(self, version: int) -> None:
        """Adopts new weights: starts from an empty batch, unless jobs are frozen in it. Call it only while idle."""
        if self._running:
            self._batch.weight_version = version
        else:
            self._batch = self._new_batch()

    async def close(self) -> None:
        """Finishes running jobs, fails waiting ones, and ends the thread."""
        self._closed, self._frozen = True, False
        self._start()  # frozen jobs go on
        await self.pause()
        self._fail(self._waiting, RunError("this inference engine was closed"))
        self._waiting.clear()
        self._thread.shutdown()

    def _start(self) -> None:
        if self._has_work and (self._runner is None or self._runner.done()):
            self._runner = asyncio.get_running_loop().create_task(self._run())

    @property
    def _has_work(self) -> bool:
        return bool(self._running and not self._frozen) or bool(self._waiting and not self._paused)

    async def _run(self) -> None:
        try:
            while self._has_work:
                seen = -1
                while seen != len(self._waiting):  # no more jobs arrive: they join in one batch
                    seen = len(self._waiting)
                    await asyncio.sleep(0)
                await self._turn(self._batch)
        finally:  # reached with running jobs that are not frozen only when the event loop ends
            if self._running and not self._frozen:
                self._start_over(RunError("the event loop ended while samples were being drawn"))

    async def _turn(self, batch: DecodeBatch) -> None:
        """Lets jobs leave and join, and decodes until that has to happen again."""
        try:
            leaving, self._abandoned = self._abandoned, set()
            self._waiting = deque(job for job in self._waiting if job not in leaving)
            self._running = [job for job in self._running if job not in leaving]
            joining: list[Job] = []
            rows = 0
            while self._fits(rows):
                joining.append(self._waiting.popleft())
                rows += len(joining[-1].unfinished)
            self._running += joining
            finished_jobs = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._advance, batch, leaving, joining
            )
        except Exception as error:  # noqa: BLE001 - any error must reach the waiting callers
            self._start_over(error)
            return
        self._running = [job for job in self._running if not job.done]
        for job in finished_jobs:
            future = self._futures.get(job)
            if future is not None and not future.done():
                future.set_result(None)

    def _fits(self, joining: int) -> bool:
        """Whether the next waiting job may join, beside `joining` rows that join with it."""
        if not self._waiting or self._paused:
            return False
        rows = len(self._batch.rows) + joining
        return rows == 0 if self._alone else rows + len(self._waiting[0].unfinished) <= self._max_rows

    def _advance(self, batch: DecodeBatch, leaving: set[Job], joining: Sequence[Job]) -> list[Job]:
        """Advance the batch until a job is done or decoding is interrupted; runs on the decoding thread."""

        def is_interrupted() -> bool:  # before every step
            return bool(self._abandoned) or self._frozen or self._fits(0) or self._batch is not batch

        try:
            return batch.advance(leaving, joining, is_interrupted)
        except StopIteration as error:  # a future refuses to carry one, so its caller would wait forever
            raise RuntimeError("StopIteration was raised while decoding") from error

    def _start_over(self, error: Exception) -> None:
        """Fail every job in the batch and continue with an empty one."""
        self._fail(self._running, error)
        self._running = []
        self._batch = self._new_batch()

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        for job in jobs:
            future = self._futures.get(job)
            if future is not None and not future.done():
                future.set_exception(error)
