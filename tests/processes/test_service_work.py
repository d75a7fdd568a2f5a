"""Work of a service ends with its client."""

from __future__ import annotations

import asyncio
import select
import threading

from skyrl.processes.service_app import HangUp, ServiceThreads


async def test_work_learns_that_its_client_is_gone_and_waiting_work_never_begins() -> None:
    workers, began, saw = ServiceThreads(1, "test"), threading.Event(), threading.Event()
    completed: list[str] = []

    def first(gone: HangUp) -> None:
        assert not gone.has_happened()
        began.set()
        watch = select.poll()
        watch.register(gone, select.POLLIN)
        watch.poll(60_000)
        if gone.has_happened():
            saw.set()

    running = asyncio.create_task(workers.run(first))
    await asyncio.to_thread(began.wait, 60)
    waiting = asyncio.create_task(workers.run(lambda gone: completed.append("second")))
    await asyncio.sleep(0)
    waiting.cancel()
    running.cancel()
    await asyncio.wait([waiting, running])
    assert await workers.run(lambda gone: "third") == "third"
    assert (saw.is_set(), completed) == (True, [])
