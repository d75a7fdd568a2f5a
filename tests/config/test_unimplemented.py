"""Settings that are not implemented yet: what asks for them is refused, and what runs is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, check, load
from skyrl.config.resolve import resolve_with_origins
from skyrl.config.unimplemented import UNIMPLEMENTED, Unimplemented
from skyrl.tree import FrozenDict, evolve_at, get_at
from skyrl.tree.classes import table_paths
from tests.config.check_cases.settings import APART, ENGINE, PLACEMENT, RAY, VLLM, gpus, resolved
from tests.config.leaves import LEAVES, OTHERS, RUNNABLE

PATHS = set(LEAVES) | set(table_paths(SkyRLTrainConfig))
REFUSING = [entry for entry in UNIMPLEMENTED if entry.runs is not None and entry.severity == "error"]


def other_values(entry: Unimplemented) -> Iterator[Any]:
    """Values of the entry's path that do not run."""
    if entry.path in PATHS - set(LEAVES):
        yield {"param_dtype": "fp32"}
        return
    value = OTHERS[entry.path]
    if value not in (entry.runs or ()):
        yield value
    if entry.path == ENGINE + "backend":
        yield "http"


def evolve_if_possible(run: SkyRLTrainConfig, path: str, value: Any) -> SkyRLTrainConfig:
    """The tree with this value, written as a file would write it."""
    if get_at(run, path) == value and type(get_at(run, path)) is type(value):
        return run
    if isinstance(value, dict) and path in PATHS - set(LEAVES):
        for name, item in value.items():
            run = evolve_at(run, f"{path}.{name}", item)
        return run
    return evolve_at(run, path, value if not isinstance(value, dict) else FrozenDict(value))


def test_the_values_that_run_are_spelled_as_a_file_has_them() -> None:
    entry = Unimplemented("trainer.strategy", "the others", (None, True, "fsdp2"))
    [problem] = entry.check(evolve_at(SkyRLTrainConfig(), entry.path, "deepspeed"))
    assert problem.hint == "what runs: none or true or fsdp2"


@pytest.mark.parametrize("entry", UNIMPLEMENTED, ids=lambda entry: entry.path)
def test_what_is_not_implemented_yet_is_a_path_of_the_tree(entry: Unimplemented) -> None:
    assert entry.path in PATHS


@pytest.mark.parametrize("entry", REFUSING, ids=lambda entry: entry.path)
def test_a_value_that_asks_for_what_is_missing_is_refused(entry: Unimplemented) -> None:
    values = list(other_values(entry))
    assert values
    for value in values:
        run = evolve_if_possible(resolved({}), entry.path, value)
        [problem] = entry.check(run)
        assert problem.path == entry.path
        assert entry.what in problem.message
        assert problem.hint.startswith("what runs: ")
        assert "Watched" not in problem.message


@pytest.mark.parametrize("entry", REFUSING, ids=lambda entry: entry.path)
def test_a_value_that_runs_is_not_refused(entry: Unimplemented) -> None:
    for value in entry.runs or ():
        assert list(entry.check(evolve_if_possible(resolved({}), entry.path, value))) == []


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
            "nccl sends memory of GPUs, and trainer.device is cpu",
        ),
        (
            gpus(2, "policy", "ref"),
            ENGINE + "num_engines",
            "1 engines of 1 GPUs (tensor 1 x pipeline 1 x data 1) take 1, and the policy has 2 (1 nodes of 2); with "
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
