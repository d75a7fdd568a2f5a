"""Mixtures of experts in a learner of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl.config import TrainerConfig
from skyrl.learners.workers import PolicyWorker
from skyrl.training.objective import policy_objective
from tests.inference.nano import nano_model
from tests.learners.rows import batch
from tests.learners.test_strategies import assert_same_numbers, changed, mini_batch

pytestmark = pytest.mark.xdist_group("ranks")


def policy(small: TrainerConfig, folder: Path, *, packing: bool) -> PolicyWorker:
    path = str(folder)
    values = {"policy.model.path": path, "use_sample_packing": packing}
    trainer = changed(small, values)
    return PolicyWorker(trainer, policy_objective(trainer.algorithm))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
async def test_packed_rows_of_a_mixture_of_experts_are_padded_ones(
    kind: str, small: TrainerConfig, tmp_path: Path
) -> None:
    nano_model(kind).save_pretrained(tmp_path)
    packed, padded = (policy(small, tmp_path, packing=packing) for packing in (True, False))
    torch.testing.assert_close(await packed.score(batch(7)), await padded.score(batch(7)), atol=1e-5, rtol=1e-5)
    assert_same_numbers(await padded.update(mini_batch(0)), await packed.update(mini_batch(0)))
    weights = dict(packed.weights())
    for name, value in padded.weights():
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-5)
