"""A run that is killed at any moment, and started again by the same command, ends like one that was not."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.forked import run
from tests.experiments.phases import PHASES, Fault
from tests.experiments.sameness import assert_same, assert_same_files, tokens
from tests.long_cases import long_except
from tests.nano_run import metrics

pytestmark = pytest.mark.xdist_group("forked")

ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__policy_num_gpus_per_node": 2,
    "trainer__placement__heartbeat_timeout_seconds": 600,  # a busy machine takes its time to import torch
}
"""Two FSDP2 ranks and an engine, each in a process of its own."""

AHEAD: dict[str, Any] = {
    "trainer__fully_async": {"enabled": True, "max_staleness_steps": 2},
    "trainer__algorithm__policy_loss_type": "decoupled",
}
"""Sampling while training."""

MOST = {
    "start": 1,
    "generation": 3,
    "reward": 24,
    "forward": 8,
    "backward": 8,
    "optimizer": 4,
    "sync": 3,
    "save": 1,
    "writing": 3,  # the state of the policy, that of the loop, and the manifest, while the run goes on
}
"""The latest entry into a phase that is drawn: each is reached within three steps."""

IN_A_CHAIN = 5
"""Kills of one run, one after the other; three steps each are fewer than the run has."""


def moments(count: int, seed: int) -> list[Fault]:
    """Every phase at least once, then any; at an entry that is drawn, and every other time a little later."""
    draw = random.Random(seed)
    phases = [*draw.sample(PHASES, len(PHASES)), *draw.choices(PHASES, k=count)][:count]
    return [
        Fault(phase=phase, nth=draw.randint(1, MOST[phase]), delay=draw.choice([0.0, draw.uniform(0, 0.02)]))
        for phase in phases
    ]


def chains(faults: list[Fault]) -> Iterator[list[Fault]]:
    yield from (faults[start : start + IN_A_CHAIN] for start in range(0, len(faults), IN_A_CHAIN))


def killed_runs(nano: Path, out: Path, faults: list[Fault], **changes: Any) -> Iterator[Path]:
    """Runs that were killed by faults, one after the other, and in the end were not."""
    for number, chain in enumerate(chains(faults)):
        killed = out / str(number)
        for fault in chain:
            status, output = run(nano, killed, fault, **changes)
            assert status == -signal.SIGKILL, (fault, output)
        status, output = run(nano, killed, **changes)
        assert status == 0, output
        assert "Traceback" not in output
        yield killed


def assert_kills_change_nothing(
    nano: Path, out: Path, uninterrupted: Path, faults: list[Fault], **changes: Any
) -> None:
    for killed in killed_runs(nano, out, faults, **changes):
        assert_same(killed, uninterrupted)
        assert_same_files(killed, uninterrupted)


def assert_every_prompt_is_trained_on_twice(out: Path) -> None:
    """12 steps of 4 prompts are two epochs of 24, of 3 samples each, none older than the bound."""
    groups = Counter((record["step"], record["prompt_id"]) for record in tokens(out))
    assert set(groups.values()) == {3}
    assert Counter(step for step, _ in groups) == dict.fromkeys(range(1, 13), 4)
    assert Counter(prompt for _, prompt in groups) == dict.fromkeys((f"0:{row}" for row in range(24)), 2)
    lags = [row[f"async/staleness_{which}"] for row in metrics(out)[1:] for which in ("min", "max")]
    assert 0 <= min(lags) <= max(lags) <= 2


EVERY_PHASE = [*moments(9, seed=1), Fault(phase="product", nth=6)]


FEW_PHASES = {"reward", "backward", "sync", "writing", "product"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("phases", long_except([{*PHASES, "product"}, FEW_PHASES], FEW_PHASES), ids=["every", "few"])
def test_a_run_that_is_killed_ends_like_one_that_was_not(
    nano: Path, tmp_path: Path, uninterrupted: Path, phases: set[str]
) -> None:
    faults = [fault for fault in EVERY_PHASE if fault.phase in phases]
    assert {fault.phase for fault in faults} == phases
    assert_kills_change_nothing(nano, tmp_path, uninterrupted, faults)


def test_an_asynchronous_run_that_is_killed_trains_on_no_prompt_too_often_or_not_at_all(
    nano: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    faults = moments(20 if pytestconfig.getoption("--long") else 2, seed=3)
    for killed in killed_runs(nano, tmp_path, faults, **AHEAD):
        assert_every_prompt_is_trained_on_twice(killed)


@pytest.mark.long
def test_a_run_on_a_task_of_reasoning_gym_that_is_killed_ends_like_one_that_was_not(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "envs" / "stand_in"))
    source = "reasoning_gym://chain_sum?seed=3&most=30&names_environment=false"
    changes: dict[str, Any] = {
        "data__train_data": [f"{source}&skip=4&rows=24"],
        "data__val_data": [f"{source}&rows=4"],
        "environment__env_class": ["reasoning_gym:chain_sum", f"{nano / 'reward.py'}:in_ascii"],
        "trainer__max_prompt_length": 200,
    }
    status, output = run(nano, tmp_path / "whole", **changes)
    assert status == 0, output
    faults = [Fault(phase=phase, nth=3) for phase in ("generation", "optimizer", "sync")]
    assert_kills_change_nothing(nano, tmp_path / "killed", tmp_path / "whole", faults, **changes)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_an_asynchronous_run_on_ray_that_is_killed_trains_on_no_prompt_too_often_or_not_at_all(
    nano: Path, tmp_path: Path, seed: int
) -> None:
    for killed in killed_runs(nano, tmp_path, moments(5, seed), **ON_RAY, **AHEAD):
        assert_every_prompt_is_trained_on_twice(killed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 11))
def test_a_run_that_is_killed_at_other_moments_ends_like_one_that_was_not(
    nano: Path, tmp_path: Path, uninterrupted: Path, seed: int
) -> None:
    assert_kills_change_nothing(nano, tmp_path, uninterrupted, moments(20, seed=seed))


CUT: dict[str, Any] = {**ON_RAY, "trainer__policy__tensor_parallel_size": 2}
"""Two ranks that cut matrices among them, in the place of two that shard them."""


@pytest.mark.long
def test_a_run_whose_ranks_cut_matrices_is_killed_and_ends_like_one_that_was_not(nano: Path, tmp_path: Path) -> None:
    status, output = run(nano, tmp_path / "whole", **CUT)
    assert status == 0, output
    assert_kills_change_nothing(nano, tmp_path / "killed", tmp_path / "whole", moments(10, seed=4), **CUT)


@pytest.fixture(scope="module")
def uninterrupted_on_ray(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on Ray that nobody disturbed."""
    out = tmp_path_factory.mktemp("uninterrupted_on_ray")
    status, output = run(nano, out, **ON_RAY)
    assert status == 0, output
    return out


ANYWHERE_ON_RAY = list(chains(moments(20, seed=2)))


def test_kills_on_ray_are_in_every_phase() -> None:
    assert {fault.phase for chain in ANYWHERE_ON_RAY for fault in chain} == set(PHASES)


@pytest.mark.long
@pytest.mark.parametrize("chain", ANYWHERE_ON_RAY, ids=lambda chain: "-".join(fault.phase for fault in chain))
def test_a_run_on_ray_that_is_killed_ends_like_one_that_was_not(
    nano: Path, tmp_path: Path, uninterrupted_on_ray: Path, chain: list[Fault]
) -> None:
    assert_kills_change_nothing(nano, tmp_path, uninterrupted_on_ray, chain, **ON_RAY)
