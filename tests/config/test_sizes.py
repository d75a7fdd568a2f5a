"""Sizes that follow from a whole run."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig
from skyrl.config.sizes import Model, data_parallel_of, replicas_of
from skyrl.tree import evolve_at

MEGATRON = {
    "trainer.strategy": "megatron",
    "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
    "trainer.policy.megatron_config.pipeline_model_parallel_size": 2,
}


@pytest.mark.parametrize(
    ("changes", "model", "of_rank"),
    [
        ({}, "policy", (0, 1, 2, 3, 4, 5, 6, 7)),
        ({"trainer.ref.sequence_parallel_size": 4}, "ref", (0, 0, 0, 0, 1, 1, 1, 1)),
        (MEGATRON, "policy", (0, 0, 1, 1, 0, 0, 1, 1)),
        (MEGATRON, "critic", (0, 1, 2, 3, 4, 5, 6, 7)),  # a critic is not split
    ],
)
def test_ranks_that_share_a_copy_of_the_model_get_the_same_rows(
    changes: dict[str, Any], model: Model, of_rank: tuple[int, ...]
) -> None:
    run = SkyRLTrainConfig()
    for path, value in (changes | {f"trainer.placement.{model}_num_gpus_per_node": 8}).items():
        run = evolve_at(run, path, value)
    found = replicas_of(run, model)
    assert (found.of_rank, found.count) == (of_rank, data_parallel_of(run, model))
