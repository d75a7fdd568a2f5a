"""Every way in which a run ends: its exit code, what is saved, and that nothing of it is left on the machine."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from attrs import frozen

from skyrl.checkpoint.store import CheckpointStore
from skyrl.processes.orphans import private_root, tagged
from tests.experiments.forked import RunSession, tiny
from tests.experiments.phases import Fault
from tests.long_cases import long_except
from tests.processes.clusters import soon

pytestmark = pytest.mark.xdist_group("forked")


@frozen(kw_only=True)
class Ending:
    """What happens to a run of six steps that saves every second one, and how it has to end."""

    fault: Fault | None = None
    exit_code: int
    saved: list[int]
    at_once: bool = False
    """The command ends without tidying up; what is left of a cluster is killed by its reaper, soon afterwards."""


STUCK = Fault(phase="optimizer", does="SIGINT again and again", nth=6, hangs=200)
ENDINGS = {
    "finished": Ending(exit_code=0, saved=[2, 4, 6]),
    "failed": Ending(fault=Fault(phase="sync", does="raise", nth=4), exit_code=1, saved=[2]),
    "Ctrl-C": Ending(fault=Fault(phase="generation", does="SIGINT", nth=4), exit_code=130, saved=[2, 3]),
    "Ctrl-C twice": Ending(fault=STUCK, exit_code=130, saved=[2], at_once=True),
    "SIGTERM": Ending(fault=Fault(phase="generation", does="SIGTERM", nth=4), exit_code=75, saved=[2, 3]),
    "SIGHUP": Ending(fault=Fault(phase="generation", does="SIGHUP", nth=4), exit_code=75, saved=[2, 3]),
    "a full disk": Ending(fault=Fault(phase="writing", does="ENOSPC", nth=4), exit_code=1, saved=[2]),
}


def end(nano: Path, out: Path, ending: Ending, environ: dict[str, str], **changes: Any) -> RunSession:
    """Runs it, and looks at everything that an ending promises."""
    temporary, mark = out / "temporary", uuid4().hex
    temporary.mkdir(parents=True)
    six = {"trainer__max_training_steps": 6, "trainer__eval_interval": -1}
    values = tiny(nano, out, **six, trainer__async_ckpt_save=not ending.at_once, **changes)
    session = RunSession(values, out, ending.fault, {**environ, "TMPDIR": str(temporary), "ENDING": mark})
    assert session.ends() == ending.exit_code, session.said
    assert CheckpointStore(out / "checkpoints").steps() == ending.saved
    assert not list((out / "checkpoints").glob(".unfinished_*")) or "disk" in session.said
    patience = 60.0 if ending.at_once else 0.0
    assert soon(lambda: what_is_left(session, temporary, mark) == [], patience), what_is_left(session, temporary, mark)
    return session


def what_is_left(session: RunSession, temporary: Path, mark: str) -> list[object]:
    """Processes, temporary files, private folders of clusters with their sockets, and locks of a run that has ended."""
    private = f"skyrl-ray-{session.process.pid}-*"
    folders = [*temporary.iterdir(), *private_root(str(temporary)).glob(private), *Path("/dev/shm").glob(private)]
    return [*tagged("ENDING", mark), *folders, *filter(is_locked, session.out.rglob("*lock*"))]


def is_locked(file: Path) -> bool:
    with file.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", long_except(ENDINGS, *(name for name in ENDINGS if name != "SIGHUP")))
def test_a_run_ends_with_its_exit_code_and_leaves_nothing(nano: Path, tmp_path: Path, name: str) -> None:
    session = end(nano, tmp_path, ENDINGS[name], {})
    assert ("Traceback" in session.said) == (name == "failed")


@pytest.mark.long
@pytest.mark.parametrize("name", long_except(ENDINGS, "SIGHUP"))
def test_a_run_that_nobody_reads_any_more_ends_alike(nano: Path, tmp_path: Path, name: str) -> None:
    end(nano, tmp_path, ENDINGS[name], {"NOBODY_READS": "1"})


@pytest.mark.long
@pytest.mark.parametrize("environ", [{}, {"NOBODY_READS": "1"}], ids=["read", "nobody reads"])
@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_on_ray_ends_alike(nano: Path, tmp_path: Path, name: str, environ: dict[str, str]) -> None:
    end(nano, tmp_path, ENDINGS[name], environ, trainer__placement__executor="ray")


@pytest.mark.long
@pytest.mark.parametrize("service", ["gcs_server", "raylet"])
def test_a_finished_run_ends_with_0_though_ray_has_died(nano: Path, tmp_path: Path, service: str) -> None:
    seen = tmp_path / "seen"
    fault = Fault(phase="product", nth=4, does=f"kill {service}", seen=str(seen))  # type: ignore[arg-type]  # a text
    end(nano, tmp_path, Ending(fault=fault, exit_code=0, saved=[2, 4, 6]), {}, trainer__placement__executor="ray")
    assert seen.exists()


def test_an_address_where_no_cluster_is_ends_a_run_at_once(nano: Path, tmp_path: Path, closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    ending = Ending(exit_code=1, saved=[])
    session = end(
        nano, tmp_path, ending, {}, trainer__placement__executor="ray", trainer__placement__ray_address=address
    )
    assert f"No connection to the Ray cluster at {address}: " in session.said


def test_a_run_that_waits_for_a_silent_cluster_hears_sigterm(nano: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        values = tiny(nano, tmp_path, trainer__placement__executor="ray", trainer__placement__ray_address=address)
        session = RunSession({**values, "trainer.faults.grace_period_seconds": 200}, tmp_path)
        server.settimeout(100)
        connection, _ = server.accept()
        os.kill(session.process.pid or 0, signal.SIGTERM)
        assert session.ends(within=100) == 75, session.said  # half of the grace period
        connection.close()
