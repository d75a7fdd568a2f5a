"""A supervised run that is killed or stopped at any moment, and started again, ends like one that was not."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from skyrl.errors import EXIT_REQUEUE
from tests.experiments.forked import run_of
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same_learning
from tests.long_cases import long_except
from tests.supervised_run import settings

pytestmark = pytest.mark.xdist_group("forked")

MOST = {"start": 1, "forward": 8, "backward": 8, "optimizer": 3, "save": 1, "writing": 3}
"""The latest entry into a phase that is drawn; a batch is three micro-batches, and every other step is saved."""


def values(nano: Path, folder: Path, kind: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    changes = {"deterministic": True, "ckpt_interval": 2, "ckpt_path": str(folder / "checkpoints")}
    return settings(nano, folder, kind, **changes)


def moments(count: int) -> list[Fault]:
    """Every phase at least once, then any; at an entry that is drawn, and every other time a little later."""
    draw = random.Random(3)
    phases = [*draw.sample(list(MOST), len(MOST)), *draw.choices(list(MOST), k=count)][:count]
    return [
        Fault(phase=phase, nth=draw.randint(1, MOST[phase]), delay=draw.choice([0.0, draw.uniform(0, 0.01)]))
        for phase in phases
    ]


@pytest.mark.parametrize("kind", long_except(["sft", "reward_model", "preference"], "reward_model"))
def test_a_supervised_run_that_is_killed_ends_like_one_that_was_not(
    nano: Path, tmp_path: Path, kind: str, pytestconfig: pytest.Config
) -> None:
    uninterrupted = tmp_path / "whole"
    status, output = run_of(values(nano, uninterrupted, kind), uninterrupted)
    assert status == 0, output
    faults = moments(30 if pytestconfig.getoption("--long") else 2)
    for number in range(0, len(faults), 3):
        killed = tmp_path / str(number)
        for fault in faults[number : number + 3]:
            status, output = run_of(values(nano, killed, kind), killed, fault)
            assert status == -signal.SIGKILL, (fault, output)
        status, output = run_of(values(nano, killed, kind), killed)
        assert status == 0 and "Traceback" not in output, output
        assert_same_learning(killed, uninterrupted)


@pytest.mark.long
def test_preferences_after_fine_tuning_end_alike_if_both_are_killed(nano: Path, tmp_path: Path) -> None:
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    faults = {uninterrupted: [], killed: [Fault(phase="backward", nth=7), Fault(phase="writing", nth=2)]}
    for folder, killing in faults.items():
        folder.mkdir()
        tuned, compared = folder / "sft", folder / "dpo"
        for kind, out, changes in (
            ("sft", tuned, {}),
            ("preference", compared, {"model.path": str(tuned / "run" / "model")}),
        ):
            run = {**values(nano, out, kind), **changes}
            for fault in killing:
                status, output = run_of(run, out, fault)
                assert status == -signal.SIGKILL, output
            status, output = run_of(run, out)
            assert status == 0 and "Traceback" not in output, output
    for kind in ("sft", "dpo"):
        assert_same_learning(killed / kind, uninterrupted / kind)


@pytest.mark.long
def test_a_supervised_run_that_is_told_to_stop_saves_its_step_and_goes_on_after_it(nano: Path, tmp_path: Path) -> None:
    uninterrupted, stopped = tmp_path / "whole", tmp_path / "stopped"
    status, output = run_of(values(nano, uninterrupted, "sft"), uninterrupted)
    assert status == 0, output
    run_values = values(nano, stopped, "sft")
    status, output = run_of(run_values, stopped, Fault(phase="optimizer", nth=5, does="SIGTERM"))
    assert status == EXIT_REQUEUE and "Step 5 is saved: the same command continues after it." in output
    status, output = run_of(run_values, stopped)
    assert status == 0 and "Continuing after step 5" in output
    assert_same_learning(stopped, uninterrupted)
