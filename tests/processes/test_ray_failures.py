from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from skyrl.errors import NonFiniteError, ProcessError
from skyrl.processes.handles import Group
from skyrl.processes.ray.processes import RayProcesses
from tests.processes.clusters import lives, soon
from tests.processes.conftest import SharedCluster
from tests.processes.objects import Counter, keep_the_interpreter, odd, unmakeable

pytestmark = pytest.mark.xdist_group("ray")

HEARTBEAT = SharedCluster.heartbeat


@pytest.fixture(scope="module")
def logs(shared_cluster: SharedCluster) -> Path:
    return shared_cluster.logs


@pytest.fixture(scope="module")
def processes(shared_cluster: SharedCluster) -> RayProcesses:
    return shared_cluster.processes()


@pytest.fixture(scope="module")
def stays(processes: RayProcesses) -> Group[Counter]:
    return processes.start("stays", [Counter, partial(Counter, 10)])


def two(processes: RayProcesses, role: str) -> Group[Counter]:
    return processes.start(role, [Counter, Counter])


@pytest.mark.long
async def test_ranks_answer_in_order(stays: Group[Counter]) -> None:
    assert await stays.call(Counter.add, 1) == [1, 11]


async def test_calls_to_one_object_interleave_where_they_await(processes: RayProcesses, stays: Group[Counter]) -> None:
    handle = stays.handles[0]
    (zero, _) = await stays.call(Counter.add, 0)
    met = await asyncio.gather(*[handle.call(Counter.meet, zero + 3) for _ in range(3)])
    assert met == [zero + 3] * 3


async def test_settings_reach_the_environment_of_every_process(stays: Group[Counter]) -> None:
    assert await stays.call(Counter.environment, "SOME_SETTING") == ["7", "7"]


async def test_the_log_of_a_rank_has_what_it_prints_and_logs_with_rank_step_and_time(
    processes: RayProcesses, stays: Group[Counter], logs: Path
) -> None:
    processes.step = 12
    began = time.strftime("%Y-%m-%dT%H:%M", time.gmtime())
    await stays.call(Counter.say, "hello")
    text = (logs / "stays-1.log").read_text()
    assert "printed hello\n" in text
    line = re.search(r"^(\S+) stays-1 step 12 INFO tests\.counter: logged hello$", text, re.MULTILINE)
    assert line is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line[1]) and line[1] >= began


async def test_a_strangers_exception_is_one_line_and_its_traceback_is_in_the_log(
    stays: Group[Counter], logs: Path
) -> None:
    with pytest.raises(ProcessError) as caught:
        await stays.handles[0].call(Counter.stumble)
    message = str(caught.value)
    log = logs / "stays-0.log"
    assert "\n" not in message
    assert re.fullmatch(
        rf"stays-0 \(process \d+ on \S+, node \w+\) failed in Counter.stumble: ValueError: a tensor of two lines "
        rf"\(tests/processes/objects.py:\d+, in stumble\); "
        rf"log: {log}",
        message,
    )
    assert 'raise ValueError("a tensor\\nof two lines")' in log.read_text()


async def test_a_missed_deadline_names_who_is_waited_for_and_logs_what_it_was_doing(
    stays: Group[Counter], logs: Path, tmp_path: Path
) -> None:
    with pytest.raises(ProcessError, match=r"stays-0 .* did not return from Counter.rest_until within 0.5 s"):
        await stays.handles[0].with_deadline(0.5).call(Counter.rest_until, tmp_path / "over")
    try:
        assert soon(lambda: "in rest_until" in (logs / "stays-0.log").read_text())
    finally:
        (tmp_path / "over").touch()


async def test_a_call_that_is_given_up_does_not_hold_the_object(stays: Group[Counter]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stays.handles[1].call(Counter.meet, 10**9), timeout=0.5)
    assert await stays.handles[1].call(Counter.add, 0) >= 10


@pytest.mark.long
def test_a_group_that_cannot_be_made_leaves_no_process(processes: RayProcesses, logs: Path) -> None:
    with pytest.raises(NonFiniteError, match="no model here"):
        processes.start("unmade", [Counter, unmakeable])
    with pytest.raises(NonFiniteError, match="no model here"):
        processes.start("unmade", [unmakeable, Counter])  # the seats are free again


@pytest.mark.long
def test_the_message_of_an_exception_that_cannot_travel_arrives(processes: RayProcesses) -> None:
    with pytest.raises(
        ProcessError, match=r"broken-0 .* failed in start: Odd: loss 2\.0 in step 3 \(.*, in odd\); log: "
    ):
        processes.start("broken", [odd])


async def test_an_object_that_calls_sys_exit_is_named_and_stays(stays: Group[Counter]) -> None:
    with pytest.raises(ProcessError, match=r"stays-0 .* failed in Counter.leave: SystemExit: 3"):
        await stays.handles[0].call(Counter.leave)
    before = await stays.handles[0].call(Counter.add, 0)
    assert await stays.handles[0].call(Counter.add, 1) == before + 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("role", "method", "cause"),
    [
        ("vanishes", Counter.vanish, r"it called os\._exit\(3\)"),
        ("crashes", Counter.crash, "Segmentation fault"),
        ("dies", Counter.die, "it was killed from outside"),
    ],
)
async def test_a_death_is_named_with_process_cause_and_log(
    processes: RayProcesses, logs: Path, role: str, method: Callable[[Counter], None], cause: str
) -> None:
    group = two(processes, role)
    (pid, _) = await group.call(Counter.process)
    message = rf"{role}-0 \(process {pid} on \S+, node \w+\) died: {cause}.*; log: {logs / role}-0.log"
    with pytest.raises(ProcessError, match=message):
        await group.handles[0].call(method)
    with pytest.raises(ProcessError, match=message):
        await group.call(Counter.add, 1)
    assert soon(lambda: not lives(pid))


async def test_a_process_that_died_is_made_anew_in_its_place(processes: RayProcesses) -> None:
    group = two(processes, "again")
    with pytest.raises(ProcessError):
        await group.handles[0].call(Counter.die)
    handle = processes.restart("again", 0, partial(Counter, 5))
    assert handle.name == "again-0"
    assert await handle.call(Counter.add, 1) == 6
    assert await group.handles[1].call(Counter.add, 1) == 1


@pytest.mark.long
async def test_a_frozen_process_is_named_and_one_that_computes_for_longer_is_not(
    processes: RayProcesses, logs: Path, tmp_path: Path
) -> None:
    group = two(processes, "freezes")
    computing = asyncio.ensure_future(group.handles[0].call(Counter.rest_until, tmp_path / "over"))
    with pytest.raises(ProcessError, match=r"freezes-1 .* no sign of life for \d+ s while it ran Counter.freeze"):
        await group.handles[1].call(Counter.freeze)
    assert "in rest_until" in (logs / "freezes-0.log").read_text()  # what the other was doing
    (tmp_path / "over").touch()
    await computing  # a call to one rank is not the business of another, and has lasted longer than the heartbeat


@pytest.mark.long
async def test_silence_counts_from_when_a_process_has_started(processes: RayProcesses) -> None:
    def slowly() -> Counter:
        keep_the_interpreter(math.ceil(1.2 * HEARTBEAT))
        return Counter()

    group = processes.start("slow", [slowly, Counter])
    assert await group.call(Counter.add, 1) == [1, 1]
    with pytest.raises(ProcessError, match=r"slow-0 .* no sign of life"):
        await group.handles[0].call(Counter.keep_the_interpreter, int(4 * HEARTBEAT))


@pytest.mark.long
@pytest.mark.parametrize(("role", "method"), [("loses", Counter.lose_a_peer), ("misses", Counter.miss_a_peer)])
async def test_the_first_cause_is_raised_and_not_what_it_causes(
    processes: RayProcesses, role: str, method: Callable[[Counter, int], None]
) -> None:
    group = two(processes, role)
    (_, peer) = await group.call(Counter.process)
    with pytest.raises(ProcessError, match=rf"^{role}-1 .* died: it was killed from outside"):
        await group.deal(method, [peer, 0])


@pytest.mark.long
async def test_a_grandchild_in_a_session_of_its_own_ends_with_its_process(processes: RayProcesses) -> None:
    group = two(processes, "spawns")
    grandchild = await group.handles[0].call(Counter.spawn)
    assert lives(grandchild)
    with pytest.raises(ProcessError):
        await group.handles[0].call(Counter.die)
    assert soon(lambda: not lives(grandchild))
