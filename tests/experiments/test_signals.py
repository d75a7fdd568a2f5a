"""A run that is told to stop keeps what it has, says so, and goes on as if nothing had happened."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from skyrl.checkpoint.store import CheckpointStore
from skyrl.errors import Stopped
from skyrl.experiments.ppo import BasePPOExp
from skyrl.processes.shutdown import ShutdownSignal
from skyrl.storage.disk import Disk
from tests.experiments.forked import RunSession, run, tiny
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same
from tests.nano_run import config, train
from tests.processes.clusters import soon

pytestmark = pytest.mark.xdist_group("forked")


def saved(out: Path) -> list[int]:
    return CheckpointStore(out / "checkpoints").steps()


FEW_PHASES = [  # and the steps that are saved then
    (Fault(phase="generation", does="SIGTERM", nth=2), [1]),
    (Fault(phase="evaluation", does="SIGTERM"), [1, 2, 4]),
    (Fault(phase="optimizer", does="kill"), [1, 2, 4]),  # the evaluation was made up for, and will be again
    (Fault(phase="save", does="SIGTERM"), [1, 2, 4, 6]),
]
EVERY_PHASE = [
    (Fault(phase="start", does="SIGTERM"), []),
    (Fault(phase="generation", does="SIGTERM", nth=2), [1]),
    (Fault(phase="reward", does="SIGTERM", nth=17), [1, 2]),
    (Fault(phase="backward", does="SIGTERM", nth=3), [1, 2, 3]),
    (Fault(phase="evaluation", does="SIGTERM"), [1, 2, 3, 4]),
    (Fault(phase="optimizer", does="kill"), [1, 2, 3, 4]),  # the evaluation was made up for, and will be again
    (Fault(phase="optimizer", does="SIGTERM", nth=2), [1, 2, 3, 4, 5]),
    (Fault(phase="sync", does="SIGTERM", nth=2), [1, 2, 3, 4, 5, 6]),
    (Fault(phase="forward", does="SIGTERM", nth=1), [1, 2, 3, 4, 5, 6]),
    (Fault(phase="save", does="SIGTERM"), [1, 2, 3, 4, 5, 6, 8]),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "faults", [FEW_PHASES, pytest.param(EVERY_PHASE, marks=pytest.mark.long)], ids=["few", "every"]
)
def test_a_run_that_is_terminated_in_any_phase_ends_like_one_that_was_not(
    nano: Path, tmp_path: Path, uninterrupted: Path, faults: list[tuple[Fault, list[int]]]
) -> None:
    out = tmp_path / "out"
    for fault, steps in faults:
        status, output = run(nano, out, fault)
        assert status == (75 if fault.does == "SIGTERM" else -signal.SIGKILL), (fault, output)
        if fault.does == "SIGTERM":
            assert re.search(r"^Stopped by SIGTERM\. .*he same command continues", output.splitlines()[-1]), (
                fault,
                output,
            )
        assert "Traceback" not in output
        assert saved(out) == steps, fault
    status, output = run(nano, out)
    assert status == 0, output
    assert_same(out, uninterrupted)


@pytest.mark.long
def test_a_run_that_is_terminated_while_a_save_is_pending_says_it_is_saved_once_it_is(
    nano: Path, tmp_path: Path
) -> None:
    status, output = run(nano, tmp_path, Fault(phase="writing", does="SIGTERM", hangs=2))
    assert status == 75, output
    [step] = re.findall(r"^Stopped by SIGTERM\. Step (\d) is saved: .*$", output.splitlines()[-1])
    assert saved(tmp_path)[-1] == int(step) >= 2
    assert not list((tmp_path / "checkpoints").glob(".unfinished_*"))


def test_a_run_that_is_terminated_while_a_save_fails_does_not_say_that_it_is_saved(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of_three = BasePPOExp(config(nano, tmp_path, trainer__ckpt_interval=1000))

    def full(self: Disk, name: str, content: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def third(step: int, groups: Any) -> None:
        if step == 3:
            run_of_three.shutdown.request("Stopped by SIGTERM")

    monkeypatch.setattr(run_of_three, "_record_samples", third)
    monkeypatch.setattr(Disk, "write", full)
    with pytest.raises(Stopped, match=r"Meanwhile: .*global_step_\d.*No space left on device; it needs .* are free"):
        run_of_three.run()
    assert saved(tmp_path) == []


def test_control_c_ends_with_130(nano: Path, tmp_path: Path) -> None:
    status, output = run(nano, tmp_path, Fault(phase="generation", does="SIGINT", nth=2))
    assert (status, saved(tmp_path)) == (130, [1])
    assert "Traceback" not in output
    assert output.splitlines()[-1] == "Stopped. Step 1 is saved: the same command continues after it."


def test_a_run_that_cannot_stop_in_time_ends_with_what_was_saved(nano: Path, tmp_path: Path) -> None:
    fault = Fault(phase="optimizer", does="SIGTERM", nth=9, hangs=200)  # in step 5: step 2 was saved before step 4 was
    status, output = run(nano, tmp_path, fault, trainer__faults__grace_period_seconds=1)
    assert status == 75
    assert saved(tmp_path) in ([2], [2, 4])
    assert "saving did not finish within 1 s" in output.splitlines()[-1]


def test_a_second_signal_ends_a_run_at_once(nano: Path, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    fault = Fault(phase="optimizer", does="SIGTERM", nth=6, hangs=200, seen=str(hanging))
    waits = {"trainer__async_ckpt_save": False, "trainer__faults__grace_period_seconds": 1000}
    session = RunSession(tiny(nano, tmp_path, **waits), tmp_path, fault)
    assert soon(lambda: hanging.exists() or not session.process.is_alive(), seconds=240)
    while session.process.is_alive():  # a signal that comes while another is pending is lost
        os.kill(session.process.pid or 0, signal.SIGTERM)
        session.process.join(0.1)
    assert (session.process.exitcode, saved(tmp_path)) == (75, [2])
    assert "immediately" in session.said


class Slow(BasePPOExp):
    """A run whose steps take a quarter of an hour by its clock."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.seconds = 0.0
        self.shutdown = ShutdownSignal(grace=1.0, stop_before=3600.0, clock=lambda: self.seconds)

    def _record_samples(self, step: int, groups: Any) -> None:
        super()._record_samples(step, groups)
        self.seconds += 900.0


@pytest.mark.long
def test_a_run_begins_no_step_that_would_not_be_over_by_its_deadline(nano: Path, tmp_path: Path) -> None:
    """After three steps 3600 - 1 - 3 * 900 = 899 seconds are left, and a step takes 900."""
    changes = {"trainer__faults__stop_before": "1h", "trainer__ckpt_interval": 1000}
    with pytest.raises(Stopped, match=r"^Stopped before the deadline of .*stop_before\. Step 3 is saved") as stopped:
        Slow(config(nano, tmp_path, **changes)).run()
    assert (stopped.value.exit_code, saved(tmp_path)) == (75, [3])
    train(nano, tmp_path, **changes)
    assert saved(tmp_path) == [3, 6]


@pytest.mark.long
def test_a_run_without_progress_says_what_it_waits_for(nano: Path, tmp_path: Path) -> None:
    ended, output = run(
        nano,
        tmp_path,
        Fault(phase="optimizer", does="nothing", nth=3, hangs=200),
        trainer__faults__stall_timeout_seconds=4,
        trainer__faults__on_stall="stop",
        trainer__faults__grace_period_seconds=2,
        trainer__max_training_steps=3,
    )
    assert ended == 1, output
    assert "warning: no progress for" in output
    assert "policy-0 in LearningWorker.optimizer_step" in output
    stacks = (tmp_path / "run" / "stacks.txt").read_text(encoding="utf-8")
    assert " in phased\n" in stacks
    assert "in optimizer_step" in stacks


@pytest.mark.parametrize(
    ("executor", "is_stopped", "left_to_their_processes"),
    [("ray", True, True), ("ray", False, False), ("in_process", True, False)],
)
async def test_a_run_that_is_stopped_does_not_wait_for_engines_in_processes_that_it_kills(
    nano: Path, tmp_path: Path, executor: str, is_stopped: bool, left_to_their_processes: bool
) -> None:
    experiment = BasePPOExp(config(nano, tmp_path, trainer__placement__executor=executor))
    experiment.client = client = Mock(close=AsyncMock())
    experiment.rollouts = Mock(close=AsyncMock())
    experiment.time_sharing = Mock()
    if is_stopped:
        experiment.shutdown.request("Stopped by SIGTERM")
    await experiment.close()
    client.close.assert_awaited_once_with(engines_end_otherwise=left_to_their_processes)
