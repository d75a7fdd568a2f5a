from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.processes.orphans import HOST, RUN, kill_tagged, make_private_folder, start_reaper, sweep, tagged
from tests.processes.clusters import lives, soon

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stray(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A marked process in a session of its own, with a child that has lost the mark."""
    child = "env -u SKYRL_RUN sleep 600 & exec sleep 600"
    environment = {**os.environ, RUN: tmp_path.name}
    with subprocess.Popen(["sh", "-c", child], env=environment, start_new_session=True) as process:
        assert soon(lambda: len(tagged(RUN, tmp_path.name)) == 2)
        yield process
        kill_tagged(RUN, tmp_path.name)


def test_what_carries_the_mark_is_killed_with_its_descendants(stray: subprocess.Popen[bytes], tmp_path: Path) -> None:
    pids = tagged(RUN, tmp_path.name)
    assert kill_tagged(RUN, tmp_path.name) == []
    assert soon(lambda: not any(lives(pid) for pid in pids))  # one that is ending has no mark any more


def test_another_mark_is_another_run(stray: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert tagged(RUN, f"{tmp_path.name}-other") == []
    assert kill_tagged(HOST, tmp_path.name) == []
    assert stray.poll() is None


def test_who_writes_to_the_folder_belongs_to_it_and_who_reads_does_not(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.touch()
    with (
        log.open("a") as writing,
        log.open() as reading,
        subprocess.Popen(["sleep", "600"], stdout=writing) as writer,
        subprocess.Popen(["sleep", "600"], stdin=reading) as reader,
    ):
        assert tagged(RUN, "nobody", tmp_path) == [writer.pid]
        writer.kill()
        reader.kill()


HOLDS_A_SEMAPHORE = (
    "import multiprocessing, sys, time\n"
    "lock = multiprocessing.get_context('spawn').Lock()\n"
    "print(lock._semlock.name, flush=True)\n"
    "time.sleep(600)"
)


def test_semaphores_in_shared_memory_are_removed_with_the_processes_that_made_them(tmp_path: Path) -> None:
    environment = {**os.environ, RUN: tmp_path.name}
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_SEMAPHORE], env=environment, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        semaphore = Path("/dev/shm") / f"sem.{holder.stdout.readline().decode().strip().removeprefix('/')}"
        assert semaphore.exists()
        assert kill_tagged(RUN, tmp_path.name) == []
    assert not semaphore.exists()
    assert tagged(RUN, tmp_path.name) == []


def test_a_sweep_takes_what_has_no_owner_and_nothing_else(tmp_path: Path) -> None:
    own_folder, lock = make_private_folder(tmp_path)
    reused = tmp_path / f"skyrl-ray-{os.getpid()}-1"  # of a process that had this number before
    gone = tmp_path / "skyrl-ray-99999999-5"
    other = tmp_path / "somebody-99999999-5"
    for folder in (reused, gone, other):
        (folder / "sockets").mkdir(parents=True)
        (folder / "lock").touch()
    assert sorted(sweep(tmp_path)) == sorted([reused, gone])
    assert sorted(tmp_path.iterdir()) == sorted([own_folder, other])
    os.close(lock)


def test_a_sweep_leaves_a_run_of_another_container_that_shares_the_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "skyrl-ray-99999999-5"  # its process has another number here, or none
    own_folder, lock = make_private_folder(tmp_path)
    own_folder.rename(elsewhere)
    assert sweep(tmp_path) == []
    os.close(lock)
    assert sweep(tmp_path) == [elsewhere]


def test_a_keeper_outlives_its_owner_and_ends_what_the_owner_started(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    owner = (
        "import os, subprocess, sys; from pathlib import Path; from skyrl.processes.orphans import *\n"
        "reaper = start_reaper(RUN, sys.argv[1], Path(sys.argv[2]))\n"
        "stray = subprocess.Popen(['sleep', '600'], env={**os.environ, RUN: sys.argv[1]}, start_new_session=True,\n"
        "                         stdout=subprocess.DEVNULL)\n"
        "print(reaper.pid, stray.pid, flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", owner, tmp_path.name, str(folder)]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reaper, stray = (int(pid) for pid in process.stdout.readline().split())
        assert lives(reaper) and lives(stray)
        process.kill()
    assert soon(lambda: not lives(stray) and not folder.exists() and not lives(reaper))


def test_a_keeper_carries_no_mark_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RUN, tmp_path.name)
    with start_reaper(RUN, tmp_path.name) as reaper:
        assert tagged(RUN, tmp_path.name) == []
        reaper.kill()
