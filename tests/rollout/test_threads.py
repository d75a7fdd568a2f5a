"""Threads that run calls of environments are used again, and never shared by two calls at once."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

from skyrl.rollout.threads import KeptThreads


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
