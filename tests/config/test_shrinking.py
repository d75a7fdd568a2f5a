"""Runs with fewer ranks: which sizes are tried, and which pass."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import compose
from skyrl.runs.shrinking import shrunk

P, E = "trainer.placement.", "generator.inference_engine."
RUN: dict[str, Any] = {
    "data.train_data": ["rows"],
    "trainer.policy.model.path": "m",
    "trainer.device": "cpu",
    "trainer.placement.executor": "ray",
    "trainer.algorithm.use_kl_loss": False,
    "trainer.eval_before_train": False,
    "trainer.eval_interval": -1,
    "trainer.train_batch_size": 4,
    "trainer.policy_mini_batch_size": 4,
    "generator.n_samples_per_prompt": 3,
    "generator.inference_engine.backend": "torch",
}
APART = {f"{P}colocate_all": False}
TWO_MACHINES = {**APART, f"{P}policy_num_nodes": 2, f"{P}policy_num_gpus_per_node": 3}


def gpus(nodes: int, gpus_per_node: int, model: str = "policy") -> dict[str, int]:
    return {f"{P}{model}_num_nodes": nodes, f"{P}{model}_num_gpus_per_node": gpus_per_node}


@pytest.mark.parametrize(
    ("changes", "role", "by_machine", "expected"),
    [
        # 12 samples are dealt out evenly to 1, 2, 3, 4, 6 and 12 ranks
        ({**APART, **gpus(1, 6)}, "policy", False, gpus(1, 4)),
        ({**APART, **gpus(1, 2)}, "policy", False, gpus(1, 1)),
        (APART, "policy", False, None),
        (TWO_MACHINES, "policy", False, gpus(2, 2)),
        (TWO_MACHINES, "policy", True, gpus(1, 3)),
        ({**APART, **gpus(1, 4), "trainer.policy.tensor_parallel_size": 2}, "policy", False, gpus(1, 2)),
        ({**APART, **gpus(1, 2), "trainer.policy.tensor_parallel_size": 2}, "policy", False, None),
        # engines that take turns with the policy become as few as its GPUs, others are one less
        ({**gpus(1, 4), f"{E}num_engines": 4}, "policy", False, {**gpus(1, 3), f"{E}num_engines": 3}),
        ({**gpus(1, 4), f"{E}num_engines": 4}, "engine", True, {**gpus(1, 3), f"{E}num_engines": 3}),
        ({**APART, f"{E}num_engines": 3}, "engine", False, {f"{E}num_engines": 2}),
        (APART, "engine", False, None),
        # models that share GPUs shrink together
        (
            {**APART, "trainer.algorithm.use_kl_loss": True, **gpus(1, 2), **gpus(1, 2, "ref")},
            "ref",
            False,
            {**gpus(1, 1), **gpus(1, 1, "ref")},
        ),
        (
            {f"{P}allocation": "vllm:d2|fsdp:d2", f"{E}backend": "vllm"},
            "policy",
            False,
            {**gpus(1, 1), f"{E}num_engines": 1},
        ),
    ],
)
def test_the_next_smaller_number_of_ranks_that_passes_the_checks(
    changes: dict[str, Any], role: str, by_machine: bool, expected: dict[str, int] | None
) -> None:
    run = compose([], {**RUN, **changes}).config
    result = shrunk(run, role, by_machine=by_machine)
    assert (None if result is None else result[1]) == expected


def test_a_supervised_run_shrinks_to_ranks_that_its_batch_is_dealt_out_to() -> None:
    values = {"kind": "sft", "model.path": "m", "train_datasets": ["rows"], "device": "cpu", "batch_size": 4}
    run = compose([], {**values, "placement.num_gpus_per_node": 4}).config
    result = shrunk(run, "policy")
    assert result is not None
    smaller: Any = result[0]
    assert smaller.placement.num_gpus_per_node == 2
