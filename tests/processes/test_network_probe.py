"""The way between two machines is measured; on one machine it is its own loopback."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

from skyrl.processes.ray.survey import Echo, measure


def test_a_way_has_a_latency_and_a_bandwidth() -> None:
    with closing(Echo("127.0.0.1")) as echo:
        for _ in range(2):  # one listener answers any number
            link = measure("127.0.0.1", echo.port, seconds=0.01)
            assert link.problem == ""
            assert link.latency is not None and 0 < link.latency < 5
            assert link.bandwidth is not None and link.bandwidth > 0


def test_an_address_that_does_not_answer_is_a_problem() -> None:
    echo = Echo("127.0.0.1")
    echo.close()
    link = measure("127.0.0.1", echo.port, patience=1.0)
    assert (link.latency, link.bandwidth) == (None, None)
    assert link.problem


def test_a_machine_that_hangs_up_or_stays_silent_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert "timed out" in measure("127.0.0.1", port, patience=0.2, seconds=0.01).problem

    with socket.create_server(("127.0.0.1", 0)) as listener:
        hangs_up = threading.Thread(target=lambda: listener.accept()[0].close())
        hangs_up.start()
        assert measure("127.0.0.1", listener.getsockname()[1], patience=5.0).problem
        hangs_up.join()
