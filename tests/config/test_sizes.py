"""Sizes that follow from a whole run."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.sizes import (
    Model,
    data_parallel_of,
    longest_row,
    replicas_of,
    scores_old_logprobs,
    sends_adapter_files,
    sends_adapters_alone,
    work_of,
)
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.tree import evolve_at
from tests.config.check_cases.settings import APART, ENGINE, LORA, RAY, VLLM, resolved

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
        (
            {"trainer.policy.context_parallel_size": 2, "trainer.policy.tensor_parallel_size": 2},
            "policy",
            (0, 0, 0, 0, 1, 1, 1, 1),
        ),
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
    replicas = replicas_of(run, model)
    assert (replicas.of_rank, replicas.count) == (of_rank, data_parallel_of(run, model))


@pytest.mark.parametrize(
    ("mini", "model", "steps", "scored"),
    [
        # 1,024 prompts with 5 samples each are 5,120 rows on one rank
        (256, "policy", 4, 5_120),
        (1_024, "policy", 1, 0),  # before the only update, the policy is the old one
        (256, "ref", 0, 5_120),
        (1_024, "ref", 0, 5_120),
    ],
)
def test_a_batch_is_scored_where_its_old_logprobs_are_used(mini: int, model: Model, steps: int, scored: int) -> None:
    work = work_of(evolve_at(SkyRLTrainConfig(), "trainer.policy_mini_batch_size", mini), model)
    assert (work.optimizer_steps, work.rows_scored) == (steps, scored)


@pytest.mark.parametrize(
    ("mini", "source", "scored"),
    [(256, "learner", 15_360), (256, "engine", 10_240), (1_024, "engine", 10_240), (1_024, "interpolated", 10_240)],
)
def test_a_bound_of_the_ratio_scores_every_mini_batch_once_more(mini: int, source: str, scored: int) -> None:
    """Two passes over the batch of 5,120 rows, and what old log-probabilities take."""
    values = {
        "policy_mini_batch_size": mini,
        "update_epochs_per_batch": 2,
        "algorithm.old_logprobs": source,
        "algorithm.max_importance_ratio": 5.0,
    }
    run = SkyRLTrainConfig()
    for path, value in values.items():
        run = evolve_at(run, f"trainer.{path}", value)
    assert work_of(run, "policy").rows_scored == scored


def test_losses_against_the_engine_or_against_nothing_need_no_old_logprobs() -> None:
    algorithm = SkyRLTrainConfig().trainer.algorithm
    by_name = {name: evolve_at(algorithm, "policy_loss_type", name) for name in POLICY_LOSSES}
    without = {name for name, facts in by_name.items() if not scores_old_logprobs(facts, optimizer_steps=2)}
    assert without == {"rollout_is", "dppo", "cross_entropy", "online_dpo"}


def test_rows_without_advantage_are_skipped_but_by_losses_of_likelihood_and_of_covariance() -> None:
    assert {name for name, facts in POLICY_LOSSES.items() if not facts.zero_at_zero_advantage} == {
        "cross_entropy",  # has no advantage
        "clip_cov",  # both choose tokens among those of all rows
        "kl_cov",
    }


@pytest.mark.parametrize(("turns", "answer"), [(1, 1024), (2, 1024 + 2000 - 512)])
def test_later_turns_are_a_part_of_the_answer(turns: int, answer: int) -> None:
    values = {"generator.max_turns": turns, "generator.max_input_length": 2000, "trainer.max_prompt_length": 512}
    assert longest_row(resolved(values)) == (512, answer)


@pytest.mark.parametrize(
    ("values", "adapters_alone", "as_files"),
    [
        (LORA, True, False),
        ({**RAY, **LORA}, True, False),
        ({**RAY, **LORA, ENGINE + "weight_sync_backend": "disk"}, True, True),
        ({**VLLM, **LORA}, False, False),  # these sleep while learners have the GPUs
        ({**VLLM, **LORA, **APART}, True, True),
        ({**VLLM, **APART}, False, False),
        ({**RAY, ENGINE + "weight_sync_backend": "disk"}, False, False),
    ],
)
def test_adapters_travel_alone_to_engines_that_keep_the_weights_below_them(
    values: dict[str, Any], adapters_alone: bool, as_files: bool
) -> None:
    run = resolved(values)
    assert (sends_adapters_alone(run), sends_adapter_files(run)) == (adapters_alone, as_files)


@pytest.mark.parametrize(("pairs", "scored"), [("best_worst", 2_048), ("random", 2_048), ("all", 5_120)])
def test_online_dpo_scores_the_answers_that_can_be_in_a_pair(pairs: str, scored: int) -> None:
    run = evolve_at(SkyRLTrainConfig(), "trainer.algorithm.policy_loss_type", "online_dpo")
    run = evolve_at(run, "trainer.algorithm.online_dpo.pairs", pairs)
    for model in ("policy", "ref"):
        work = work_of(run, model)
        assert (work.rows_scored, work.scoring_micro_batches) == (scored, scored)
    assert work_of(run, "policy").rows_per_mini_batch == 1_280
