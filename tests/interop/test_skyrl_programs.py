"""SkyRL's example programs with an estimator of their own: the converted settings compute what the program does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SkyRLTrainConfig
from skyrl.interop.report import Conversion
from skyrl.interop.skyrl.scripts import convert_overrides
from skyrl.training.advantage import advantage_estimator, reward_shaping
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
    return advantage_estimator(algorithm)(batch.with_fields(rewards=shaped))


def test_distillation_trains_each_token_on_the_distance_to_the_teacher() -> None:
    conversion = converted(
        DISTILLATION,
        "trainer.algorithm.advantage_estimator=no_op",
        "trainer.algorithm.policy_loss_type=importance_sampling",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.use_kl_loss=false",
    )
    assert not conversion.refused
    result = advantages(
        conversion,
        [[0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0]],  # a reward of the environment, which does not count
        rollout_logprobs=None,
        old_logprobs=torch.tensor(OLD),
        ref_logprobs=torch.tensor(TEACHER),
    )
    torch.testing.assert_close(result, torch.tensor([[0.0, 0.5, -0.5, 2.0], [0.0, -1.0, 0.0, 0.0]]))
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
    result = advantages(conversion, [[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0]], rollout_logprobs=None)
    torch.testing.assert_close(result, torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0]]))


def test_the_simple_baseline_is_the_mean_of_the_batch() -> None:
    conversion = converted(BASELINE, "trainer.algorithm.advantage_estimator=simple_baseline")
    assert not conversion.refused
    result = advantages(conversion, [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], rollout_logprobs=None)
    torch.testing.assert_close(result, torch.tensor([[0.0, 0.5, 0.5, 0.5], [0.0, -0.5, -0.5, 0.0]]))


def test_a_baseline_over_several_turns_is_refused() -> None:
    turns = "generator.max_turns=2"
    [line] = converted(BASELINE, "trainer.algorithm.advantage_estimator=simple_baseline", turns).refused
    assert "rewards before a token" in line.reason


def test_the_report_says_that_the_program_was_taken_as_published() -> None:
    conversion = converted(BASELINE, "trainer.algorithm.advantage_estimator=simple_baseline")
    assert "if yours differs, set your own function" in conversion.report()


def test_the_same_name_is_refused_in_the_script_of_another_program() -> None:
    conversion = converted("mine.main", "trainer.algorithm.advantage_estimator=simple_baseline")
    assert [problem.path for problem in conversion.problems if problem.severity == "error"] == [
        "trainer.algorithm.advantage_estimator"
    ]
    assert outcomes(conversion) == {"trainer.algorithm.advantage_estimator": "kept"}


@pytest.mark.parametrize(
    ("program", "overrides", "expected"),
    [
        ("examples.train.fully_async.main_fully_async", [], {"enabled": True, "max_staleness_steps": 4}),
        ("examples.async.main_fully_async", ["trainer.fully_async.max_staleness_steps=2"], {"max_staleness_steps": 2}),
        (
            "examples.train.async.main_async",
            [],
            {"enabled": True, "max_staleness_steps": 1, "interrupt_generation": False},
        ),
        ("examples.train.algorithms.dapo.main_dapo_fully_async", [], {"enabled": True}),
        ("examples.train_integrations.harbor.entrypoints.main_harbor_fully_async", [], {"enabled": True}),
        ("skyrl.train.entrypoints.main_base", [], {"enabled": False}),
    ],
)
def test_an_asynchronous_program_makes_an_asynchronous_run(
    program: str, overrides: list[str], expected: dict[str, object]
) -> None:
    conversion = converted(program, "trainer.placement.colocate_all=false", *overrides)
    fully_async = structure(conversion.tables, SkyRLTrainConfig).trainer.fully_async
    assert {name: getattr(fully_async, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("program", "overrides", "expected"),
    [
        ("examples.train.algorithms.dapo.main_dapo", [], (512, 1.0)),
        ("examples.train.tis_correction.main_tis_dapo", [], (512, 1.0)),
        ("examples.algorithms.dapo.main_dapo", ["+trainer.algorithm.overlong_buffer.len=64"], (64, 1.0)),
        ("main_dapo", ["trainer.algorithm.overlong_buffer_penalty_factor=0.5"], (512, 0.5)),
        ("skyrl.train.entrypoints.main_base", [], (None, 1.0)),
    ],
)
def test_the_program_of_dapo_has_its_penalty(
    program: str, overrides: list[str], expected: tuple[int | None, float]
) -> None:
    conversion = converted(program, "trainer.epochs=1", *overrides)
    overlong = structure(conversion.tables, SkyRLTrainConfig).trainer.algorithm.reward_shaping.overlong
    assert (overlong.buffer_len, overlong.penalty_factor) == expected


HARBOR = "examples.train_integrations.harbor.entrypoints.main_harbor"


def test_harbor_trial_settings_convert_to_agent_kwargs() -> None:
    conversion = converted(
        HARBOR,
        "harbor_trial_config.trials_dir=trials",
        "harbor_trial_config.agent.kwargs.temperature=0.7",
        "harbor_trial_config.agent.kwargs.max_turns=8",
        "harbor_trial_config.agent.kwargs.store_all_messages=true",
        "generator.rate_limit.enabled=true",
        "generator.rate_limit.trajectories_per_second=2.5",
        "generator.rate_limit.max_concurrency=10",
        "generator.inference_engine.engine_init_kwargs.max_model_len=4096",
        "generator.inference_engine.engine_init_kwargs.chat_template=thinking.jinja2",
        "generator.step_wise_trajectories=true",
    )
    assert not conversion.refused
    run = structure(conversion.tables, SkyRLTrainConfig)
    agent = run.environment.agent
    assert (agent.function, agent.reward) == ("skyrl.rollout.harbor:play", "returned")
    assert (agent.max_starts_per_second, agent.max_concurrent) == (2.5, 10)
    assert agent.kwargs["trials_dir"] == "trials"
    assert agent.kwargs["agent"]["kwargs"]["max_turns"] == 8
    assert agent.kwargs["agent"]["override_timeout_sec"] == 1200  # of the program's default.yaml
    assert "store_all_messages" not in agent.kwargs["agent"]["kwargs"]
    assert run.generator.sampling_params.temperature == 0.7
    assert run.generator.eval_sampling_params is not None
    assert run.generator.eval_sampling_params.temperature == 0.7
    assert run.generator.sampling_params.max_tokens == run.generator.max_input_length == 4096
    assert run.generator.chat_template.name_or_path == "thinking.jinja2"
    assert outcomes(conversion)["generator.step_wise_trajectories"] == "needless"


def test_implied_settings_of_a_program_are_reported() -> None:
    report = converted(HARBOR, "harbor_trial_config.trials_dir=trials").report()
    assert "->  environment.agent.kwargs.agent.name" in report
    assert "->  environment.agent.kwargs.trials_dir" in report
    assert "trials_dir = '~/trials'" not in report  # the script says another


def test_limits_that_are_not_enabled_are_left_out() -> None:
    conversion = converted(HARBOR, "generator.rate_limit.enabled=false", "generator.rate_limit.max_concurrency=10")
    assert set(outcomes(conversion).values()) == {"needless"}


def test_settings_of_trials_in_another_file_are_refused() -> None:
    [line] = converted("examples.harbor.entrypoints.main_harbor", "+harbor_trial_config=mine").refused
    assert "mine.yaml" in line.reason


def test_a_program_that_only_samples_says_what_does_that_here() -> None:
    assert "`skyrl generate`" in converted(HARBOR + "_generate", "harbor_trial_config.trials_dir=t").report()


def test_limits_of_another_program_are_refused() -> None:
    [line] = converted("mine.main", "+generator.rate_limit.enabled=true").refused
    assert "a custom field" in line.reason
