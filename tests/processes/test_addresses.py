"""Interfaces, addresses that answer, and what is said of machines that do not."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from skyrl.processes.addresses import interface_of, why_unreachable
from skyrl.processes.ray import watch as ray_watch
from skyrl.processes.ray.watch import Member, Watch, death_reason


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_an_address_that_nobody_listens_at_is_told_from_one_that_answers(closed_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert why_unreachable("127.0.0.1", listener.getsockname()[1]) is None
    assert "refused" in (why_unreachable("127.0.0.1", closed_port) or "")


@pytest.mark.parametrize(
    ("machine", "reason", "message"),
    [
        (None, None, "for 9 s while it ran update: it is stopped, or hangs in native code; what"),
        (("10.0.0.2", 20000), None, "for 9 s while it ran update: it is stopped, or hangs in native code; what"),
        (
            ("10.0.0.2", 20000),
            "timed out",
            "for 9 s while it ran update: its machine 10.0.0.2 cannot be reached (timed out at port 20000): it is "
            "down, or the network is cut; what",
        ),
    ],
)
def test_a_machine_that_is_cut_off_is_told_from_a_process_that_hangs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: tuple[str, int] | None,
    reason: str | None,
    message: str,
) -> None:
    monkeypatch.setattr(ray_watch, "why_unreachable", lambda host, port: reason)
    monkeypatch.setattr("ray.wait", lambda *_, **__: ([], []))
    monkeypatch.setattr("time.monotonic", lambda: 109.0)
    actor: Any = None
    member = Member("policy", 1, actor, tmp_path / "log")
    member.machine, member.asked, member.seen, member.is_starting = machine, object(), 100.0, False
    member.busy[0] = "update"
    watch = Watch(heartbeat=5.0)
    watch.close()
    watch._look_at(member)
    assert message in str(member.exit_notice.error)


def test_the_machine_of_a_process_that_died_with_it_is_named() -> None:
    error = RuntimeError("The actor is dead because its node has died. Node Id: ab12")
    assert death_reason(error, ("10.0.0.2", 20000)).startswith("its machine 10.0.0.2 no longer answers Ray")
