"""What a configuration says about memory: whether it fits the GPUs that it names, and what would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, check, load, resolve
from skyrl.config.derive.sizes import models_of
from skyrl.config.estimates.memory import Phase, learner_of, local_shape, models_without_sizes, phases_of
from skyrl.config.estimates.memory_fit import judged, verdict_of, with_changes
from skyrl.tree import evolve_at

P = "trainer.placement."
ENGINE = "generator.inference_engine."
ON_A_GPU = {"trainer.device": "cuda", "trainer.logger": "console", f"{P}gpu_kind": "H100-80"}
ON_A_CPU = {"trainer.device": "cpu", f"{P}gpu_kind": None, f"{ENGINE}backend": "torch"}


NOTHING: Mapping[str, Any] = {}


def run_of(model: str, gpus: int = 1, changes: Mapping[str, Any] = NOTHING) -> SkyRLTrainConfig:
    """Policy, reference and engines on the same GPUs of one machine."""
    placed = {f"{P}{role}_num_gpus_per_node": gpus for role in ("policy", "ref")} | {f"{ENGINE}num_engines": gpus}
    return resolve(load([], ON_A_GPU | placed | {"trainer.policy.model.path": model} | dict(changes)))


def phase(run: SkyRLTrainConfig, name: str, role: str = "policy") -> Phase:
    [phase] = [candidate for candidate in phases_of(run) or () if (candidate.name, candidate.role) == (name, role)]
    return phase


def memory_warnings(run: SkyRLTrainConfig) -> list[tuple[str, str, str | None]]:
    return [
        (problem.path, problem.message, problem.hint) for problem in check(run) if "does not fit" in problem.message
    ]


def test_a_small_model_fits_and_nothing_is_said() -> None:
    run = run_of("Qwen/Qwen2.5-0.5B", 1, {f"{ENGINE}gpu_memory_utilization": 0.7})
    verdict = verdict_of(run)
    assert verdict is not None
    assert verdict.fits
    assert verdict.cache_holds is not None
    assert verdict.cache_holds > 1
    assert memory_warnings(run) == []


def test_a_model_of_72_billion_on_one_gpu_is_a_warning_with_a_remedy() -> None:
    [(path, message, hint)] = memory_warnings(run_of("Qwen/Qwen2.5-72B-Instruct"))
    assert path == f"{P}policy_num_gpus_per_node"
    assert message.startswith("does not fit H100-80: update of the policy takes ")
    assert hint is not None
    assert f"{ENGINE}tensor_parallel_size" in hint


@pytest.mark.parametrize(("model", "gpus"), [("Qwen/Qwen2.5-72B", 1), ("Qwen/Qwen2.5-7B", 1), ("Qwen/Qwen3-8B", 8)])
def test_the_nearest_that_is_named_fits(model: str, gpus: int) -> None:
    run = run_of(model, gpus, {"trainer.micro_train_batch_size_per_gpu": 32, f"{ENGINE}gpu_memory_utilization": 0.9})
    verdict = verdict_of(run)
    assert verdict is not None
    assert not verdict.fits
    assert verdict.nearest
    for path, value in verdict.nearest.items():
        run = evolve_at(run, path, value)
    changed = verdict_of(run)
    assert changed is not None
    assert changed.fits


def test_the_nearest_fills_whole_machines_and_changes_no_more_than_it_must() -> None:
    rows = "trainer.micro_train_batch_size_per_gpu"
    run = run_of("Qwen/Qwen2.5-72B", 1, {rows: 32, f"{ENGINE}gpu_memory_utilization": 0.9})
    verdict = verdict_of(run)
    assert verdict is not None
    assert verdict.nearest
    nearest = dict(verdict.nearest)
    assert (nearest[f"{P}policy_num_nodes"], nearest[f"{P}policy_num_gpus_per_node"]) == (4, 8)
    assert (nearest[f"{ENGINE}num_engines"], nearest[f"{ENGINE}tensor_parallel_size"]) == (8, 4)
    for milder in ({rows: 2 * nearest[rows]}, {f"{ENGINE}gpu_memory_utilization": 0.7}):
        changed = verdict_of(with_changes(run, nearest | milder))
        assert changed is not None
        assert not changed.fits


@pytest.mark.parametrize("gpus", [9, 16])
def test_machines_of_more_than_eight_gpus_grow_in_number(gpus: int) -> None:
    verdict = verdict_of(run_of("Qwen/Qwen2.5-72B", gpus))
    assert verdict is not None
    assert verdict.nearest
    assert f"{P}policy_num_nodes" in verdict.nearest
    assert f"{P}policy_num_gpus_per_node" not in verdict.nearest


def test_few_machines_with_cheap_changes_are_nearer_than_many_machines_alone() -> None:
    run = run_of("Qwen/Qwen2.5-72B", 16)
    verdict = verdict_of(run)
    assert verdict is not None
    assert verdict.nearest
    assert verdict.nearest[f"{P}policy_num_nodes"] <= 4
    changed = judged(with_changes(run, verdict.nearest), local_shape)
    assert changed is not None
    assert changed.fits


def test_without_a_kind_of_gpu_nothing_is_judged() -> None:
    run = run_of("Qwen/Qwen2.5-72B", 1, {f"{P}gpu_kind": None})
    assert verdict_of(run) is None
    assert phases_of(run)
    assert memory_warnings(run) == []


MEGATRON = {"trainer.strategy": "megatron"}


def test_megatrons_degrees_and_recomputation_are_estimated() -> None:
    def update(**sizes: int) -> Phase:
        degrees = {
            f"trainer.{role}.megatron_config.{name}_parallel_size": size
            for role in ("policy", "ref")
            for name, size in sizes.items()
        }
        return phase(run_of("Qwen/Qwen2.5-7B", 8, MEGATRON | degrees), "update")

    uncut, cut, staged = update(), update(tensor_model=8), update(pipeline_model=4)
    assert cut.parts["parameters"] * 8 == pytest.approx(uncut.parts["parameters"], rel=0.01)
    assert uncut.parts["parameters"] / 4 < staged.parts["parameters"] < uncut.parts["parameters"] / 3
    table = "trainer.policy.megatron_config.transformer_config_kwargs"
    rows = {**MEGATRON, "trainer.micro_train_batch_size_per_gpu": 16}
    kept = run_of("Qwen/Qwen2.5-7B", 8, {**rows, table: {"recompute_granularity": None}})
    recomputed = phase(run_of("Qwen/Qwen2.5-7B", 8, rows), "update")
    assert phase(kept, "update").parts["activations"] > 2 * recomputed.parts["activations"]


def test_what_megatron_does_not_read_is_no_remedy() -> None:
    verdict = verdict_of(run_of("Qwen/Qwen2.5-7B", 1, {**MEGATRON, "trainer.recompute_activations": False}))
    assert verdict is not None
    assert not verdict.fits
    assert not {"trainer.recompute_activations", "trainer.policy.fsdp_config.cpu_offload"} & {*(verdict.nearest or {})}


def test_an_unknown_model_is_named_and_not_guessed() -> None:
    run = run_of("somebody/else")
    assert phases_of(run) is None
    assert models_without_sizes(run) == ("somebody/else",)


def test_sizes_are_read_from_a_folder(tmp_path: Path) -> None:
    values = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(values | {"vocab_size": 100}), encoding="utf-8")
    shape = local_shape(str(tmp_path))
    assert shape is not None
    assert shape.parameters == 2 * 800 + 8 + 4 * 64 + 3 * 64 + 16
    (tmp_path / "config.json").write_text("[1", encoding="utf-8")
    assert local_shape(str(tmp_path)) is None


def test_models_that_take_turns_wait_on_the_host() -> None:
    run = run_of("Qwen/Qwen2.5-7B", 8)
    weights = 7_615_616_512
    # float32 weights and the two means of AdamW, over 8 ranks; the reference has no optimizer
    assert phase(run, "generation", "engine").host == 12 * weights // 8 + 4 * weights // 8
    assert phase(run, "update").parts["optimizer"] >= 8 * weights // 8
    assert phase(run, "scoring").parts["optimizer"] == 0


def test_engines_are_awake_while_weights_come() -> None:
    run = run_of("Qwen/Qwen2.5-7B", 8)
    assert phase(run, "transfer").parts["cache"] == phase(run, "generation", "engine").parts["cache"] > 0
    apart = run_of("Qwen/Qwen2.5-7B", 8, {f"{P}colocate_all": False})
    assert phase(apart, "transfer").parts.get("cache", 0) == 0


def test_an_offloaded_optimizer_is_on_the_host() -> None:
    zero = "trainer.policy.deepspeed_config.zero_optimization.offload_optimizer.device"
    plain = run_of("Qwen/Qwen2.5-7B", 8, {"trainer.strategy": "deepspeed"})
    offloaded = run_of("Qwen/Qwen2.5-7B", 8, {"trainer.strategy": "deepspeed", zero: "cpu"})
    moved = 12 * 7_615_616_512 // 8
    assert phase(plain, "update").bytes - phase(offloaded, "update").bytes == moved
    assert phase(offloaded, "update").host - phase(plain, "update").host == moved


@pytest.mark.parametrize(
    ("in_float", "dtype", "size"), [(True, "bfloat16", 4), (False, "bfloat16", 2), (False, "float32", 4)]
)
def test_megatron_keeps_gradients_in_float_where_it_sums_or_computes_in_it(
    in_float: bool, dtype: str, size: int
) -> None:
    summed = {"trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32": in_float, "trainer.compute_dtype": dtype}
    run = run_of("Qwen/Qwen2.5-0.5B", 1, MEGATRON | summed)
    shape = local_shape("Qwen/Qwen2.5-0.5B")
    assert shape is not None
    assert phase(run, "update").parts["gradients"] == size * shape.parameters


def test_a_model_that_only_scores_has_no_adapter() -> None:
    run, shape = run_of("Qwen/Qwen2.5-0.5B", 1, {"trainer.policy.model.lora.rank": 8}), local_shape("Qwen/Qwen2.5-0.5B")
    assert shape is not None
    ranks = [learner_of(run, model, shape).adapter_rank for model in models_of(run)]
    assert ranks == [8, 0]


def test_models_of_one_process_lie_beside_each_other_on_a_cpu() -> None:
    policy_only, with_reference = (
        phase(run_of("Qwen/Qwen2.5-0.5B", 1, {**ON_A_CPU, "trainer.algorithm.use_kl_loss": with_kl}), "update")
        for with_kl in (False, True)
    )
    shape = local_shape("Qwen/Qwen2.5-0.5B")
    assert shape is not None
    assert with_reference.parts["parameters"] - policy_only.parts["parameters"] == 4 * shape.parameters
