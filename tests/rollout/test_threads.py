"""Threads that run calls of environments: used again, shared by quick calls, and left behind by calls that block."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from asyncio import sleep
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest

from skyrl.rollout.env_calls import EnvCalls, EpisodeError
from skyrl.rollout.threads import FEW, Job, KeptThreads, Mailbox, ThreadCall, Workers
from tests.effects.stage import StageLoop

T = TypeVar("T")


def test_a_thread_that_is_idle_runs_the_next_job() -> None:
    threads, ran = KeptThreads(), SimpleQueue[int]()
    seen = set()
    for _ in range(5):
        threads.run(lambda: ran.put(threading.get_ident()))
        seen.add(ran.get())
        while not threads._idle:  # the job is done before its thread is idle
            os.sched_yield()
    assert len(seen) == 1


def test_jobs_that_run_at_once_have_threads_of_their_own() -> None:
    threads, ran, go = KeptThreads(), SimpleQueue[int](), threading.Event()

    def wait() -> None:
        ran.put(threading.get_ident())
        go.wait()

    for _ in range(3):
        threads.run(wait)
    assert len({ran.get() for _ in range(3)}) == 3
    go.set()


def test_a_thread_with_nothing_to_do_ends_and_another_takes_its_place() -> None:
    threads, ran = KeptThreads(idle_seconds=0.001), SimpleQueue[int]()
    for _ in range(50):
        threads.run(lambda: ran.put(threading.get_ident()))
        assert ran.get()
    while threads._idle:
        os.sched_yield()


def test_thousands_of_threads_ask_for_the_interpreter_less_often_and_few_as_ever() -> None:
    threads, go, before = KeptThreads(idle_seconds=0.001), threading.Event(), sys.getswitchinterval()
    for _ in range(4 * FEW):
        threads.run(go.wait)
    assert sys.getswitchinterval() == pytest.approx(4 * before, rel=0.01)
    go.set()
    while sys.getswitchinterval() > before:
        os.sched_yield()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_forked_process_starts_threads_of_its_own() -> None:
    threads, ran = KeptThreads(), SimpleQueue[int]()
    threads.run(lambda: ran.put(1))
    ran.get()
    while not threads._idle:
        os.sched_yield()
    child = os.fork()
    if child == 0:
        answered = threading.Event()
        threads.run(answered.set)
        os._exit(0 if answered.wait(60) else 1)
    assert os.waitpid(child, 0)[1] == 0


async def test_quick_calls_of_one_turn_of_the_event_loop_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.rollout.threads.PATIENCE", 3600.0)
    workers, ran = Workers(KeptThreads(), 8), SimpleQueue[tuple[int, int]]()
    for number in range(5):
        workers.run(ThreadCall(partial(_tell, ran, number)))
    results = [await _of(ran) for _ in range(5)]
    assert [number for number, _ in results] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in results}) == 1


async def test_a_call_that_blocks_holds_up_no_other() -> None:
    workers, ran, go = Workers(KeptThreads(), 3), SimpleQueue[tuple[int, int]](), threading.Event()
    workers.run(ThreadCall(partial(_tell, ran, 0, go)))
    for number in range(1, 5):
        workers.run(ThreadCall(partial(_tell, ran, number)))
    assert [(await _of(ran))[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    go.set()


async def test_as_many_calls_run_at_a_time_as_there_may_be_threads() -> None:
    workers, ran, go = Workers(KeptThreads(), 2), SimpleQueue[tuple[int, int]](), threading.Event()
    calls = [ThreadCall(partial(_tell, ran, number, go)) for number in range(4)]
    for call in calls:
        workers.run(call)
    assert {(await _of(ran))[0] for _ in range(2)} == {0, 1}
    workers._add()
    assert [call.start_time is None for call in calls] == [False, False, True, True]
    workers.give_up(calls[3])  # it never runs
    workers.give_up(calls[0])  # it keeps its place
    assert not workers.are_given_up
    assert calls[2].start_time is None
    go.set()
    assert (await _of(ran))[0] == 2
    assert calls[3].start_time is None


async def test_a_call_that_was_given_up_gives_its_place_back_when_it_returns() -> None:
    workers, ran, go = Workers(KeptThreads(), 1), SimpleQueue[tuple[int, int]](), threading.Event()
    lost = ThreadCall(go.wait)
    workers.run(lost)
    while lost.start_time is None:
        await sleep(0)
    workers.give_up(lost)
    assert workers.are_given_up
    workers.run(ThreadCall(partial(_tell, ran, 1)))
    for _ in range(3):
        await sleep(0)
    assert ran.empty()
    go.set()
    assert (await _of(ran))[0] == 1
    assert not workers.are_given_up


async def test_a_call_that_no_place_becomes_free_for_fails_and_says_why() -> None:
    go, calls, live = threading.Event(), EnvCalls(2, 0.05), SimpleQueue[int]()

    def hang(number: int) -> None:
        live.put(number)
        go.wait()

    results = await asyncio.gather(*(calls("it", hang, number) for number in range(5)), return_exceptions=True)
    assert sorted(live.get() for _ in range(live.qsize())) == [0, 1]
    assert [str(error) for error in results[:2] if isinstance(error, EpisodeError)] == [
        "it gave no answer within 0.05 s (environment.skyrl_gym.step_timeout_seconds)"
    ] * 2
    reasons = {str(error) for error in results[2:] if isinstance(error, EpisodeError)}
    assert reasons == {
        "it was not called: calls that missed their deadline still run in all 2 places "
        "(environment.skyrl_gym.max_env_workers). Raise it, or let the environment end what takes longer than 0.05 s "
        "(environment.skyrl_gym.step_timeout_seconds)"
    }
    go.set()
    while calls._workers.are_given_up:
        await sleep(0)
    assert (await calls("it", int, "7"))[0] == 7


@pytest.mark.parametrize("most", [2, 12])
async def test_coroutines_need_no_thread_while_they_wait_and_as_many_as_allowed_run_at_a_time(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, finished = SimpleQueue[Job](), SimpleQueue[Job]()
    run = KeptThreads.run

    def counted(kept: KeptThreads, job: Job) -> None:
        def work() -> None:
            job()
            finished.put(job)

        at_work.put(job)
        run(kept, work)

    monkeypatch.setattr(KeptThreads, "run", counted)
    monkeypatch.setattr("skyrl.rollout.threads.PATIENCE", 3600.0)
    at_once, seen, go = set[int](), list[int](), asyncio.Event()

    async def wait(number: int) -> int:
        at_once.add(number)
        seen.append(len(at_once))
        if len(seen) == most:
            while finished.qsize() < at_work.qsize():  # for ever, if a thread waits for a coroutine
                await sleep(0)
            go.set()
        await go.wait()
        at_once.remove(number)
        return number

    calls: Any = EnvCalls(most, 60.0)
    results = await asyncio.gather(*(calls("it", wait, number) for number in range(12)))
    assert [number for number, _ in results] == list(range(12))
    assert max(seen) == most


async def test_what_a_coroutine_raises_reaches_the_caller_and_one_that_is_late_is_cancelled() -> None:
    cancelled = threading.Event()

    async def fail() -> None:
        raise ValueError("no")

    async def late() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    calls: Any = EnvCalls(1, 0.05)
    with pytest.raises(EpisodeError, match=r"it raised ValueError: no"):
        await calls("it", fail)
    with pytest.raises(EpisodeError, match=r"it gave no answer within 0.05 s"):
        await calls("it", late)
    assert cancelled.wait(60)
    assert (await calls("it", int, "7"))[0] == 7


async def test_the_event_loop_is_woken_once_for_letters_that_come_before_it_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mailbox, loop, read, woken = Mailbox(), asyncio.get_running_loop(), list[int](), list[object]()

    def wake(letter: Callable[[], None]) -> None:
        woken.append(letter)
        loop.call_soon(letter)

    monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
    for number in range(3):
        mailbox.put(partial(read.append, number), loop)
    assert (read, len(woken)) == ([], 1)
    await sleep(0)
    assert read == [0, 1, 2]
    mailbox.put(partial(read.append, 3), loop)
    assert len(woken) == 2


def _tell(ran: SimpleQueue[tuple[int, int]], number: int, go: threading.Event | None = None) -> None:
    """Say that a call runs, and in which thread; then wait."""
    ran.put((number, threading.get_ident()))
    if go is not None:
        go.wait()


async def _of(queue: SimpleQueue[T]) -> T:
    """The next item, while the event loop continues."""
    while queue.empty():
        await sleep(0)
    return queue.get()


def test_a_call_behind_one_that_blocks_begins_after_a_few_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    start_times = list[float | None]()

    def block(workers: Workers) -> None:
        call = workers._next_call()
        assert call is not None
        start_times.append(call.start_time)

    async def both() -> None:
        workers = Workers(KeptThreads(), 2)
        for _ in range(2):
            workers.run(ThreadCall(list))
        await sleep(0.01)  # on a stage, where it takes no time

    monkeypatch.setattr(KeptThreads, "run", lambda _, work: work())
    monkeypatch.setattr(Workers, "_work", block)
    with asyncio.Runner(loop_factory=StageLoop) as runner:
        runner.run(both())
    assert len(start_times) == 2


@pytest.mark.parametrize(("takes", "ends"), [(2.75, 3.25), (3.25, 3.5)])
def test_the_deadline_of_a_call_counts_from_when_a_thread_takes_it(
    takes: float, ends: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread is free after half a second; the call may take three."""

    def take(workers: Workers) -> None:
        call = workers._next_call()
        assert call is not None
        asyncio.get_running_loop().call_later(takes, call.run)

    async def called() -> tuple[object, float]:
        try:
            result: object = (await EnvCalls(1, 3.0)("it", int, "7"))[0]
        except EpisodeError as error:
            result = str(error)
        return result, asyncio.get_running_loop().time()

    monkeypatch.setattr(KeptThreads, "run", lambda _, work: asyncio.get_running_loop().call_later(0.5, work))
    monkeypatch.setattr(Workers, "_work", take)
    late = "it gave no answer within 3 s (environment.skyrl_gym.step_timeout_seconds)"
    with asyncio.Runner(loop_factory=StageLoop) as runner:
        assert runner.run(called()) == (7 if takes < 3.0 else late, ends)
