"""Settings that are not implemented yet: what asks for them is refused, and what runs is not."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from skyrl.config import SkyRLTrainConfig, check, load
from skyrl.config.foundation.unimplemented import UNIMPLEMENTED, Unimplemented
from skyrl.config.loading.kinds import RL
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.tree import evolve_at
from tests.config.check_cases.settings import APART, ENGINE, PLACEMENT, RAY, VLLM, gpus
from tests.config.leaves import RUNNABLE


def test_everything_in_the_tree_is_implemented() -> None:
    assert UNIMPLEMENTED == ()


def test_what_would_not_be_is_refused_with_the_values_that_run() -> None:
    entry = Unimplemented("trainer.strategy", "the others", (None, True, "fsdp2"))
    [problem] = entry.check(evolve_at(SkyRLTrainConfig(), entry.path, "deepspeed"))
    assert problem.message == "'deepspeed' does not run in this version; not implemented yet: the others"
    assert (problem.severity, problem.hint) == ("error", "supported: none or true or fsdp2")
    assert list(entry.check(evolve_at(SkyRLTrainConfig(), entry.path, "fsdp2"))) == []


def test_a_table_that_is_not_read_is_told_for_each_of_its_fields() -> None:
    entry = Unimplemented("trainer.policy.megatron_config.lora_config", "adapters")
    run = evolve_at(SkyRLTrainConfig(), f"{entry.path}.lora_type", "canonical_lora")
    [problem] = entry.check(run)
    assert (problem.path, problem.severity) == (f"{entry.path}.lora_type", "warning")
    assert list(entry.check(SkyRLTrainConfig())) == []


def test_what_is_not_implemented_is_listed_field_by_field() -> None:
    table = "trainer.policy.megatron_config.torch_profiler_config"
    entries = (Unimplemented("trainer.strategy", "the others"), Unimplemented(table, "traces"))
    listed = evolve(RL, unimplemented=entries).unimplemented_paths
    assert set(listed) == {"trainer.strategy", f"{table}.enable", f"{table}.ranks", f"{table}.save_path"}


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
