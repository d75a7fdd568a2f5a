"""SkyRL's example programs with an estimator of their own: the converted settings compute what the program does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SkyRLTrainConfig
from skyrl.interop.report import Conversion
from skyrl.interop.skyrl_programs import program_of
from skyrl.interop.skyrl_scripts import convert_overrides
from skyrl.training.advantage import advantage_estimator
from skyrl.training.shaping import reward_shaping
from skyrl.tree.builder import structure

DISTILLATION = "examples.train.on_policy_distillation.main_on_policy_distill"
BASELINE = "examples.train.algorithms.custom_advantage_estimator.main_custom_adv_est"

OLD = [[0.0, -1.0, -2.0, -3.0], [0.0, -0.5, -0.25, 0.0]]
TEACHER = [[0.0, -0.5, -2.5, -1.0], [0.0, -1.5, -0.25, 0.0]]
MASK = [[False, True, True, True], [False, True, True, False]]


def converted(program: str, *overrides: str) -> Conversion:
    return convert_overrides(list(overrides), program=program)


def outcomes(conversion: Conversion) -> dict[str, str]:
    return {line.source: line.outcome for line in conversion.lines}


def advantages(conversion: Conversion, rewards: list[list[float]], **others: Any) -> Tensor:
    """Of two answers to one prompt, through shaping and estimator."""
    algorithm = structure(conversion.tables, SkyRLTrainConfig).trainer.algorithm
    batch = TrainingBatch(
        input_ids=torch.zeros(2, 4, dtype=torch.int64),
        lengths=torch.tensor([4, 3]),
        loss_mask=torch.tensor(MASK),
        rewards=torch.tensor(rewards),
        groups=torch.tensor([0, 0]),
        **others,
    )
    shaped, _ = reward_shaping(algorithm)(batch)
    return advantage_estimator(algorithm)(batch.given(rewards=shaped))


def test_distillation_trains_each_token_on_the_distance_to_the_teacher() -> None:
    conversion = converted(
        DISTILLATION,
        "trainer.algorithm.advantage_estimator=no_op",
        "trainer.algorithm.policy_loss_type=importance_sampling",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.use_kl_loss=false",
    )
    assert not conversion.refused
    found = advantages(
        conversion,
        [[0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0]],  # a reward of the environment, which does not count
        rollout_logprobs=None,
        old_logprobs=torch.tensor(OLD),
        ref_logprobs=torch.tensor(TEACHER),
    )
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5, -0.5, 2.0], [0.0, -1.0, 0.0, 0.0]]))
    algorithm = structure(conversion.tables, SkyRLTrainConfig).trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.loss_reduction) == ("importance_sampling", "seq_mean_token_sum_norm")


def test_settings_that_the_distilling_program_does_not_read_are_left_out() -> None:
    conversion = converted(
        DISTILLATION,
        "trainer.algorithm.advantage_estimator=no_op",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.kl_loss_coef=0.01",
        "trainer.algorithm.kl_estimator_type=k3",
        "trainer.algorithm.loss_reduction=token_mean",
    )
    assert {path for path, outcome in outcomes(conversion).items() if outcome == "needless"} == {
        "trainer.algorithm.kl_loss_coef",
        "trainer.algorithm.kl_estimator_type",
        "trainer.algorithm.loss_reduction",
    }


def test_without_the_penalty_the_distilling_program_trains_on_the_rewards_of_tokens() -> None:
    conversion = converted(
        DISTILLATION, "trainer.algorithm.advantage_estimator=no_op", "trainer.algorithm.use_kl_in_reward=false"
    )
    found = advantages(conversion, [[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0]], rollout_logprobs=None)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0]]))


def test_the_simple_baseline_is_the_mean_of_the_batch() -> None:
    conversion = converted(BASELINE, "trainer.algorithm.advantage_estimator=simple_baseline")
    assert not conversion.refused
    found = advantages(conversion, [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], rollout_logprobs=None)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5, 0.5, 0.5], [0.0, -0.5, -0.5, 0.0]]))


def test_a_baseline_over_several_turns_is_refused() -> None:
    turns = "generator.max_turns=2"
    [line] = converted(BASELINE, "trainer.algorithm.advantage_estimator=simple_baseline", turns).refused
    assert "rewards before a token" in line.why


def test_the_report_says_that_the_program_was_taken_as_published() -> None:
    conversion = converted(BASELINE, "trainer.algorithm.advantage_estimator=simple_baseline")
    assert "if yours was changed, name your own function" in conversion.report()


def test_the_same_name_is_refused_in_the_script_of_another_program() -> None:
    conversion = converted("mine.main", "trainer.algorithm.advantage_estimator=simple_baseline")
    assert [problem.path for problem in conversion.problems if problem.severity == "error"] == [
        "trainer.algorithm.advantage_estimator"
    ]
    assert outcomes(conversion) == {"trainer.algorithm.advantage_estimator": "kept"}


def test_the_program_of_a_script_is_the_last_module_that_it_starts() -> None:
    assert program_of(f"set -x\nuv run --isolated --extra vllm -m {BASELINE} \\\n  trainer.epochs=1\n") == BASELINE
    assert program_of("python train.py trainer.epochs=1") == ""
