"""Layouts that are proposed for a run: they fit, they pass the check, and their reasons are true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve

from skyrl.autotune.search import Proposal, proposals, reasons
from skyrl.config import SkyRLTrainConfig, check, load, resolve
from skyrl.config.estimates.memory import local_shape
from skyrl.config.estimates.memory_fit import verdict_of, with_changes
from skyrl.config.estimates.step_time import step_time, training_seconds
from skyrl.planning.model_shape import ModelShape

ENGINE = "generator.inference_engine."
NOTHING: Mapping[str, Any] = {}


def run_of(model: str, changes: Mapping[str, Any] = NOTHING) -> SkyRLTrainConfig:
    """A run on H100s with answers of up to 8,192 tokens."""
    values = {
        "trainer.device": "cuda",
        "trainer.logger": "console",
        "trainer.placement.gpu_kind": "H100-80",
        "trainer.policy.model.path": model,
        "trainer.train_batch_size": 256,
        "generator.sampling_params.max_generate_length": 8192,
    }
    return resolve(load([], values | dict(changes)))


def proposed(model: str, gpus: int, changes: Mapping[str, Any] = NOTHING) -> tuple[SkyRLTrainConfig, list[Proposal]]:
    run = run_of(model, changes)
    return run, proposals(run, gpus, local_shape)


CLUSTERS = [
    *((model, gpus) for model in ("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B") for gpus in (8, 16, 64)),
    *(("Qwen/Qwen2.5-7B", gpus) for gpus in (1, 8, 16, 64)),
]
BY_DEFAULT = [("Qwen/Qwen3-30B-A3B", 16), ("meta-llama/Llama-3.1-70B", 64), ("Qwen/Qwen2.5-7B", 1)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "gpus"),
    [case if case in BY_DEFAULT else pytest.param(*case, marks=pytest.mark.long) for case in CLUSTERS],
)
def test_the_fastest_layout_passes_the_check_and_fits(model: str, gpus: int) -> None:
    _, [fastest, *_] = proposed(model, gpus)
    run = run_of(model, fastest.changes)
    verdict = verdict_of(run)
    assert check(run) == []
    assert verdict is not None
    assert verdict.fits


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B"])
def test_a_model_that_fits_no_single_gpu_has_no_layout_on_one(model: str) -> None:
    assert proposed(model, 1)[1] == []


@pytest.mark.long
def test_proposals_are_in_the_order_of_their_seconds_and_use_all_gpus() -> None:
    _, candidates = proposed("Qwen/Qwen2.5-7B", 16)
    seconds = [proposal.seconds.step for proposal in candidates]
    assert seconds == sorted(seconds)
    for layout in candidates:
        learners = 8 * layout.changes["trainer.placement.policy_num_nodes"]
        shared = layout.changes["trainer.placement.colocate_all"]
        assert (learners if shared else learners + layout.engine_gpus) == 16
        assert shared <= (learners == layout.engine_gpus)


@pytest.mark.long
def test_learners_and_engines_that_overlap_are_faster_apart_than_in_turns_apart() -> None:
    apart = {"trainer.placement.colocate_all": False}
    _, overlapped = proposed("Qwen/Qwen2.5-7B", 16, {**apart, "trainer.fully_async.enabled": True})
    _, in_turns = proposed("Qwen/Qwen2.5-7B", 16, apart)

    def best(candidates: list[Proposal]) -> float:
        return min(
            proposal.seconds.step for proposal in candidates if not proposal.changes["trainer.placement.colocate_all"]
        )

    assert best(overlapped) < best(in_turns)


@pytest.mark.long
def test_each_reason_names_what_the_plainer_setting_would_take() -> None:
    run, candidates = proposed("meta-llama/Llama-3.1-70B", 64)
    of_megatron = {"trainer.policy.megatron_config.transformer_config_kwargs.recompute_granularity": "none"}
    for strategy, plainer in (("megatron", of_megatron), ("fsdp2", {"trainer.recompute_activations": False})):
        first = next(proposal for proposal in candidates if proposal.changes["trainer.strategy"] == strategy)
        verdict = verdict_of(with_changes(run, {**first.changes, **plainer}))
        assert verdict is not None
        [explanation] = [reason for reason in reasons(run, first, local_shape) if reason.startswith("recompute")]
        assert f"{verdict.over[0].bytes / 2**30:.1f} GiB" in explanation


@pytest.mark.long
def test_stages_of_a_pipeline_are_proposed_where_they_are_faster_with_the_reason() -> None:
    run, [fastest, *_] = proposed("meta-llama/Llama-3.1-70B", 64)
    assert fastest.changes["trainer.policy.megatron_config.pipeline_model_parallel_size"] > 1
    [reason] = [line for line in reasons(run, fastest, local_shape) if line.startswith("pipeline_model_parallel_size")]
    assert reason.startswith("pipeline_model_parallel_size: with 1, ")


@pytest.mark.long
def test_experts_are_spread_where_that_is_faster() -> None:
    _, [fastest, *_] = proposed("Qwen/Qwen3-30B-A3B", 16)
    assert fastest.changes["trainer.policy.megatron_config.expert_model_parallel_size"] > 1


@pytest.mark.long
def test_a_kind_of_model_without_a_converter_is_not_proposed_for_megatron() -> None:
    run = run_of("meta-llama/Llama-3.1-70B")

    def other(path: str) -> ModelShape | None:
        shape = local_shape(path)
        return None if shape is None else evolve(shape, converts=False)

    assert not any(proposal.changes["trainer.strategy"] == "megatron" for proposal in proposals(run, 64, other))


@pytest.mark.long
def test_states_wait_on_the_host_only_where_nothing_else_fits() -> None:
    run, [proposal] = proposed("Qwen/Qwen2.5-7B", 1, {"generator.sampling_params.max_generate_length": 1024})
    assert any("offload" in path for path in proposal.changes)
    assert any(reason.startswith("offload_optimizer: with none") for reason in reasons(run, proposal, local_shape))
    assert not any("offload" in path for path in proposed("Qwen/Qwen2.5-7B", 8)[1][0].changes)


@pytest.mark.long
def test_shorter_answers_take_less_time() -> None:
    run, candidates = proposed("Qwen/Qwen2.5-7B", 8)
    changed = with_changes(run, candidates[0].changes)
    short, long = (step_time(changed, local_shape, tokens) for tokens in (500, 5000))
    assert short is not None
    assert long is not None
    assert short.step < long.step
    assert step_time(changed, lambda path: None) is None


@pytest.mark.long
def test_scoring_each_mini_batch_takes_time() -> None:
    run, candidates = proposed("Qwen/Qwen2.5-7B", 8, {"trainer.algorithm.old_logprobs": "engine"})
    changed = with_changes(run, candidates[0].changes)
    bounded = with_changes(changed, {"trainer.algorithm.max_importance_ratio": 5.0})
    without, once = (step_time(variant, local_shape, 500) for variant in (changed, bounded))
    assert without is not None
    assert once is not None
    assert without.scoring < once.scoring


@pytest.mark.long
def test_a_bound_of_tokens_stays_one() -> None:
    _, candidates = proposed("Qwen/Qwen2.5-7B", 8, {"trainer.max_tokens_per_microbatch": 16384})
    assert all("trainer.max_tokens_per_microbatch" in proposal.changes for proposal in candidates)
    assert all("trainer.micro_train_batch_size_per_gpu" not in proposal.changes for proposal in candidates)


@pytest.mark.long
def test_a_step_that_overlaps_takes_the_longer_of_both() -> None:
    _, candidates = proposed("Qwen/Qwen2.5-7B", 8)
    seconds = candidates[0].seconds
    together = evolve(seconds, overlaps=True)
    assert seconds.step - together.step == pytest.approx(min(seconds.generation, seconds.training))


def test_every_layout_of_small_mini_batches_passes_the_check() -> None:
    small = {"trainer.policy_mini_batch_size": 4, "generator.sampling_params.max_generate_length": 512}
    _, candidates = proposed("Qwen/Qwen2.5-0.5B", 8, small)  # 20 samples: whole on 4 ranks, and not on 8
    assert candidates
    assert [check(run_of("Qwen/Qwen2.5-0.5B", {**small, **proposal.changes})) for proposal in candidates] == [[]] * len(
        candidates
    )


def test_the_seconds_of_the_learners_are_those_of_their_phases() -> None:
    run = run_of("Qwen/Qwen2.5-7B")
    seconds = step_time(run, local_shape)
    assert seconds is not None
    assert training_seconds(run, local_shape) == pytest.approx(seconds.training)


def test_prompts_are_read_for_each_sample_where_engines_share_no_prefix() -> None:
    shared, apart = (
        step_time(run_of("Qwen/Qwen2.5-7B", {f"{ENGINE}enable_prefix_caching": caches}), local_shape)
        for caches in (True, False)
    )
    assert shared is not None
    assert apart is not None
    assert shared.generation < apart.generation


def test_scoring_twice_takes_twice_as_long() -> None:
    bounded = {"trainer.algorithm.old_logprobs": "engine", "trainer.algorithm.max_importance_ratio": 5.0}
    run = run_of("Qwen/Qwen2.5-7B", {**bounded, "trainer.algorithm.use_kl_loss": False})
    passes = [with_changes(run, {"trainer.update_epochs_per_batch": times}) for times in (1, 2)]
    once, twice = (step_time(variant, local_shape, 100) for variant in passes)
    assert once is not None
    assert twice is not None
    assert twice.scoring == pytest.approx(2 * once.scoring)
