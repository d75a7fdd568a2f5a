"""Supervised runs on Ray: the same file as in one process, on two ranks of each strategy."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.forked import RunSession, run_of
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same_learning
from tests.supervised_run import records, settings, toml_file, train

pytestmark = pytest.mark.xdist_group("forked")

KINDS = pytest.mark.parametrize("kind", ["sft", "reward_model", "preference"])
STRATEGIES = pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed"])


def losses(folder: Path) -> list[float]:
    return [record["train/loss"] for record in records(folder) if record["step"]]


def assert_one_file_has_the_same_losses_on_two_ranks(nano: Path, folder: Path, kind: str, strategy: str) -> None:
    values = {name: value for name, value in settings(nano, folder, kind).items() if name != "run_path"}
    file = toml_file(folder / "run.toml", {**values, "num_epochs": 1})
    on_ray = {"placement.num_gpus_per_node": 2, "strategy": strategy}
    for name, changes in {"alone": {}, "together": on_ray}.items():
        session = RunSession({**changes, "run_path": str(folder / name / "run")}, folder / name, files=[file])
        assert session.ends() == 0, session.said
        logs = sorted(log.name for log in (folder / name / "run").rglob("*-1.log"))
        assert logs == (["policy-1.log", "ref-1.log"][: 1 + (kind == "preference")] if changes else [])
    assert losses(folder / "together") == pytest.approx(losses(folder / "alone"), abs=1e-5)
    assert len(losses(folder / "alone")) == 4


@pytest.mark.long
def test_one_file_has_the_losses_of_one_process_on_two_ranks(nano: Path, tmp_path: Path) -> None:
    assert_one_file_has_the_same_losses_on_two_ranks(nano, tmp_path, "sft", "fsdp2")


@pytest.mark.long
@STRATEGIES
@KINDS
def test_every_kind_has_the_losses_of_one_process_under_every_strategy(
    nano: Path, tmp_path: Path, kind: str, strategy: str
) -> None:
    assert_one_file_has_the_same_losses_on_two_ranks(nano, tmp_path, kind, strategy)


def on_ray(folder: Path, strategy: str) -> dict[str, Any]:
    return {
        "placement__num_gpus_per_node": 2,
        "strategy": strategy,
        "deterministic": True,
        "ckpt_interval": 2,
        "ckpt_path": str(folder / "checkpoints"),
    }


@pytest.mark.long
@STRATEGIES
@KINDS
def test_a_run_on_ray_that_goes_on_is_bit_for_bit_one_that_was_never_interrupted(
    nano: Path, tmp_path: Path, kind: str, strategy: str
) -> None:
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    train(nano, uninterrupted, kind, **on_ray(uninterrupted, strategy))
    train(nano, parts, kind, **on_ray(parts, strategy), num_steps=3)
    train(nano, parts, kind, **on_ray(parts, strategy))
    assert_same_learning(uninterrupted, parts)


@pytest.mark.long
@KINDS
def test_a_run_on_ray_that_is_killed_ends_like_one_that_was_not(nano: Path, tmp_path: Path, kind: str) -> None:
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    train(nano, uninterrupted, kind, **on_ray(uninterrupted, "fsdp2"))
    killed.mkdir()
    values = settings(nano, killed, kind, **on_ray(killed, "fsdp2"))
    for phase, nth in {"start": 1, "backward": 11, "writing": 3, "optimizer": 2}.items():
        status, output = run_of(values, killed, Fault(phase=phase, nth=nth))
        assert status == -signal.SIGKILL, output
    status, output = run_of(values, killed)
    assert status == 0 and "Traceback" not in output, output
    assert_same_learning(killed, uninterrupted)
