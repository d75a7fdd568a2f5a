"""Runs on Ray that lose ranks of a model: they begin again by themselves, and train on the same samples."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skyrl.checkpoint.store import CheckpointStore
from skyrl.cli.main import main
from skyrl.errors import RunError
from skyrl.experiments import experiment
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs import recovery
from tests.nano_run import all_metrics, metrics, overrides, train
from tests.supervised_run import toml_file

pytestmark = pytest.mark.xdist_group("lostranks")

SHORT: dict[str, Any] = {
    "trainer__deterministic": True,
    "trainer__micro_train_batch_size_per_gpu": 1,
    "trainer__micro_forward_batch_size_per_gpu": 1,
    "trainer__max_training_steps": 4,
    "trainer__ckpt_interval": 2,
    "trainer__async_ckpt_save": False,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}
ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__policy_num_gpus_per_node": 2,
}


class LosesRanks(BasePPOExp):
    """The last rank of the policy is killed between sampling and update of some steps, each time once."""

    losses: ClassVar[list[int]] = []
    ranks: ClassVar[list[int]] = []
    """Ranks of each attempt."""

    def _record_samples(self, step: int, groups: Any) -> None:
        super()._record_samples(step, groups)
        if self.losses and step == self.losses[0]:
            self.losses.pop(0)
            kill(self.processes, f"policy-{len(self.policy.ranks) - 1}")

    async def prepare(self) -> None:
        self.ranks.append(len(self.policy.ranks))
        await super().prepare()


def kill(processes: Any, name: str) -> None:
    [member] = [member for member in processes._members if member.name == name]
    match = re.search(r"process (\d+)", member.location)
    assert match is not None
    os.kill(int(match[1]), signal.SIGKILL)


def run_losing(nano: Path, out: Path, patch: pytest.MonkeyPatch, losses: list[int], **changes: Any) -> int:
    """Exit code of `skyrl run` with an experiment that loses ranks in these steps."""
    out.mkdir(parents=True, exist_ok=True)
    patch.setattr(LosesRanks, "losses", list(losses))
    patch.setattr(LosesRanks, "ranks", [])
    patch.setattr(recovery, "PAUSE", 0.0)
    patch.setattr(experiment, "experiment_class", lambda run: LosesRanks)
    patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with pytest.raises(SystemExit) as end:
        main(["run", toml_file(out / "run.toml", overrides(nano, out, **{**SHORT, **ON_RAY, **changes}))])
    assert isinstance(end.value.code, int)
    return end.value.code


def samples(out: Path) -> list[tuple[int, str, list[int]]]:
    """Step, prompt and answer of everything that was trained on, in order."""
    lines = (out / "run" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["step"], row["prompt_id"], row["response_ids"]) for row in map(json.loads, lines)]


def assert_trained_on_the_same(nano: Path, out: Path, undisturbed: Path, **changes: Any) -> None:
    """As a run that lost nothing: samples, and losses to 1e-5."""
    train(nano, undisturbed, **{**SHORT, **changes})
    assert samples(out) == samples(undisturbed)
    for one, two in zip(metrics(undisturbed), metrics(out), strict=True):
        if one["step"]:
            assert two["policy/final_loss"] == pytest.approx(one["policy/final_loss"], rel=1e-5, abs=1e-5)


@pytest.mark.long
def test_a_run_restarts_on_the_remaining_ranks(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_losing(nano, tmp_path / "out", monkeypatch, [3], trainer__faults__on_lost_rank="shrink") == 0
    stderr = capfd.readouterr().err
    assert re.search(r"The run failed: policy-1 \(process \d+ on .* died: it was killed", stderr), stderr
    assert (
        "It restarts in 0 s (lost rank 1 of 3), with:\n  trainer.placement.policy_num_gpus_per_node: 2 -> 1\n" in stderr
    )
    assert "Continuing after step 2, from a checkpoint" in stderr
    assert LosesRanks.ranks == [2, 1]
    assert CheckpointStore(tmp_path / "out" / "checkpoints").manifest(4).world_size == {"policy": 1}
    assert_trained_on_the_same(nano, tmp_path / "out", tmp_path / "undisturbed")


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "steps", "ranks"),
    [("shrink", [1, 4, 5], [4, 3, 2, 1]), ("wait", [1, 2, 3, 4, 5, 6, 7], [4] * 8)],
)
def test_ten_lost_ranks_change_nothing_that_is_trained_on(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, steps: list[int], ranks: list[int]
) -> None:
    length = {"trainer__max_training_steps": 8, "trainer__epochs": 2}
    faults = {"trainer__faults__on_lost_rank": policy, "trainer__faults__max_lost_ranks": len(steps)}
    four = {"trainer__placement__policy_num_gpus_per_node": 4}
    assert run_losing(nano, tmp_path / "out", monkeypatch, steps, **length, **faults, **four) == 0
    assert LosesRanks.ranks == ranks
    assert [record["step"] for record in all_metrics(tmp_path / "out") if record["step"]] == list(range(1, 9))
    assert_trained_on_the_same(nano, tmp_path / "out", tmp_path / "undisturbed", **length)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [({}, [2]), ({"trainer__faults__on_lost_rank": "wait", "trainer__faults__max_lost_ranks": 1}, [2, 2])],
)
def test_a_run_ends_when_max_lost_ranks_is_reached(
    nano: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    ranks: list[int],
) -> None:
    assert run_losing(nano, tmp_path / "out", monkeypatch, [3, 3], **changes) == RunError.exit_code
    assert LosesRanks.ranks == ranks
    assert re.search(r"policy-1 \(process \d+ on .* died: it was killed", capfd.readouterr().err.splitlines()[-1])
    assert CheckpointStore(tmp_path / "out" / "checkpoints").steps() == [2]
