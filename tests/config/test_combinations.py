"""Combinations of strategy, engines, executor and weight transfer that run are not refused, and others are, once."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import check, load
from skyrl.config.loading.resolve import resolve_with_origins
from tests.config.check_cases.settings import APART, ENGINE, PLACEMENT, RAY, VLLM, gpus
from tests.config.leaves import RUNNABLE


@pytest.mark.parametrize(
    "values",
    [
        {"trainer.strategy": "deepspeed"},  # one rank in one process
        {"trainer.strategy": "deepspeed", **APART, **gpus(2, "policy", "ref")},
        {**VLLM},  # vLLM runs without CUDA, too
        {ENGINE + "backend": "vllm", PLACEMENT + "executor": "in_process"},
        {**APART, **gpus(2, "policy"), ENGINE + "num_engines": 3},
        {**RAY, **gpus(2, "policy", "ref"), ENGINE + "num_engines": 2},
        {**RAY, ENGINE + "weight_sync_backend": "gloo"},
        {**RAY, ENGINE + "weight_sync_backend": "disk"},
        {**RAY, ENGINE + "weight_sync_backend": "delta"},
        {**VLLM, **RAY, "trainer.device": "cuda", ENGINE + "weight_sync_backend": "nccl"},
        {**RAY, "trainer.device": "cuda"},  # gloo is derived
        {
            **RAY,
            **gpus(4, "policy", "ref"),
            ENGINE + "num_engines": 4,
            "trainer.policy.sequence_parallel_size": 2,
            "trainer.policy.tensor_parallel_size": 2,
            "trainer.ref.sequence_parallel_size": 4,
        },
        {**RAY, PLACEMENT + "ray_address": "auto", PLACEMENT + "call_timeout_seconds": 60},
    ],
)
def test_a_run_on_several_processes_or_engines_is_not_refused(values: dict[str, Any]) -> None:
    loaded = load([], RUNNABLE | values)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    assert check(run, origins) == []


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        (
            {ENGINE + "weight_sync_backend": "nccl"},
            ENGINE + "weight_sync_backend",
            "nccl sends GPU memory, but trainer.device is cpu",
        ),
        (
            gpus(2, "policy", "ref"),
            ENGINE + "num_engines",
            "1 engine of 1 GPU (tensor 1 x pipeline 1 x data 1) takes 1, and the policy has 2 (1 node of 2); with "
            "trainer.placement.colocate_all they share them",
        ),
    ],
)
def test_what_cannot_run_on_ray_is_refused_once(values: dict[str, Any], path: str, message: str) -> None:
    loaded = load([], RUNNABLE | RAY | values)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    [problem] = check(run, origins)
    assert (problem.path, problem.message, problem.severity) == (path, message, "error")
    assert problem.hint


def test_a_road_that_nothing_travels_on_is_told_and_not_refused() -> None:
    with_nccl = load([], RUNNABLE | {ENGINE + "weight_sync_backend": "nccl"})
    run, origins, _ = resolve_with_origins(with_nccl.config, with_nccl.origins)
    [problem] = check(run, origins)
    assert (problem.path, problem.severity) == (ENGINE + "weight_sync_backend", "warning")
