"""A number that is none on one rank alone: all ranks leave the same out, or go back together, or the run ends."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.errors import NonFiniteError
from skyrl.learners.rank_metrics import Metrics, RankMetrics
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.learning_worker import Objective
from skyrl.learners.workers.roles import PolicyWorker
from tests.experiments.test_guards import assert_only_numbers_were_saved
from tests.nano_run import metrics, train

pytestmark = pytest.mark.long

ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__placement__policy_num_gpus_per_node": 2,
    "trainer__placement__heartbeat_timeout_seconds": 600,  # a busy machine takes its time to import torch
    "trainer__policy_mini_batch_size": 2,
    "trainer__micro_train_batch_size_per_gpu": 3,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}
"""Two optimizer steps in each of six steps, a checkpoint after every second one."""

WHAT = "SPOILT"
"""The environment variable that says what the last rank spoils, so that it reaches the actors of Ray."""


class SpoiltPolicyWorker(PolicyWorker):
    """Whose last rank spoils a number once: of a score, of a gradient, or of a weight after its step."""

    calls = 0

    def _now(self, quantity: str, at: int) -> bool:
        if os.environ[WHAT] != quantity or self.ranks.rank != self.ranks.size - 1:
            return False
        self.calls += 1
        return self.calls == at

    async def score(self, batch: TrainingBatch) -> Tensor:
        scores = await super().score(batch)  # of three steps, and of the sync before each
        if self._now("logprob", 6):
            scores[0, -1] = -torch.inf
        return scores

    async def forward_backward_share(self, batch: TrainingBatch, objective: Objective) -> RankMetrics:
        if self._now("gradient", 5):  # the first of the third step
            assert batch.advantages is not None
            batch = batch.with_fields(advantages=torch.full_like(batch.advantages, torch.nan))
        return await super().forward_backward_share(batch, objective)

    async def optimizer_step(self, settings: StepSettings) -> Metrics:
        step = self.strategy.step
        if self._now("weight", 5):

            def diverging(settings: StepSettings) -> float:
                norm = step(settings)
                [first, *_] = (value for _, value in self.strategy.shards(optimizer=False) if value.numel())
                with torch.no_grad():
                    local = getattr(first, "_local_tensor", first)
                    local.view(-1)[0] = torch.nan
                return norm

            self.strategy.step = diverging  # type: ignore[method-assign]  # replaced for the test
        try:
            return await super().optimizer_step(settings)
        finally:
            self.strategy.step = step  # type: ignore[method-assign]  # replaced for the test


@pytest.fixture(params=["fsdp2", "deepspeed"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("skyrl.experiments.ppo.PolicyWorker", SpoiltPolicyWorker)
    return ON_RAY | {"trainer__strategy": request.param}


def test_abort_ends_the_run_on_all_ranks(
    nano: Path, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WHAT, "gradient")
    with pytest.raises(NonFiniteError, match=r"the policy's gradient norm is (inf|nan)"):
        train(nano, tmp_path, **settings, trainer__faults__on_non_finite="abort")
    assert_only_numbers_were_saved(tmp_path, {2})


@pytest.mark.parametrize(
    ("quantity", "left_out"), [("logprob", "trainer/skipped_steps"), ("gradient", "policy/skipped_updates")]
)
def test_skip_leaves_the_same_out_on_all_ranks(
    nano: Path, tmp_path: Path, settings: dict[str, Any], quantity: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WHAT, quantity)
    train(nano, tmp_path, **settings, trainer__faults__on_non_finite="skip")
    assert_only_numbers_were_saved(tmp_path, {2, 4, 6})
    assert len([row["step"] for row in metrics(tmp_path) if row.get(left_out)]) == 1


def test_all_ranks_go_back_together(
    nano: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(WHAT, "weight")
    train(nano, tmp_path, **settings, trainer__faults__on_non_finite="roll_back")
    assert re.search(r"rolling back to step 2 .* of the policy holds NaN", capsys.readouterr().err)
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    assert_only_numbers_were_saved(tmp_path, {2, 4, 6})
