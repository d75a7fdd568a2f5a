"""An estimator of the user's own is tried before a run starts: its form, its numbers, and groups of equal rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, ConfigError, DynamicSamplingConfig
from skyrl.config.settings.registry import AdvantageEstimatorRegistry
from skyrl.errors import Problem
from skyrl.experiments.preflight import custom_algorithms_can_be_called
from skyrl.training.advantage import advantage_estimator
from tests.nano_run import config

FIELD = "trainer.algorithm.advantage_estimator"
SKYRL = "def own(batch):\n    return "
VERL = "def own(token_level_rewards, response_mask, index):\n    rewards = token_level_rewards\n    return "
BY_DEVIATION = "batch.rewards / batch.scores[batch.groups == 0].std()"
LEAVES_OUT: tuple[dict[str, Any], ...] = (
    {"zero_variance_filter": True},
    {"dynamic_sampling": DynamicSamplingConfig(type="filter")},
    {"dynamic_sampling": DynamicSamplingConfig(type="replace")},
)


def estimator_in(folder: Path, source: str) -> str:
    file = folder / "own.py"
    file.write_text(f"import torch\n\n{source}\n")
    return f"{file}:own"


def refused(name: str, **settings: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        advantage_estimator(AlgorithmConfig(advantage_estimator=name, **settings))
    [problem] = caught.value.problems
    assert problem.path == FIELD
    return problem


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SKYRL + "batch.rewards.sum(1)", "gives a tensor (10,) for rewards of shape (10, 8)"),
        (SKYRL + "None", "gives None for rewards of shape (10, 8)"),
        (SKYRL + "batch.rewardz", "fails with a small batch: AttributeError"),
        (SKYRL + "batch.rewards.log()", "gives the advantage nan for"),
        (SKYRL + "batch.rewards / 0", "gives the advantage"),
        (SKYRL + BY_DEVIATION, "tokens of a batch with equal rewards of all answers to a prompt"),
        (SKYRL + "batch.rewards / batch.scores[:, None].abs()", "tokens of a batch with the rewards 0, 1, 0.5 and -1"),
        (VERL + "rewards.log(), rewards", "gives the advantage nan for"),
        (VERL + "rewards / rewards[index == 0].sum(1).std(), rewards", "equal rewards of all answers to a prompt"),
    ],
)
def test_what_gives_no_advantages_is_refused(source: str, message: str, tmp_path: Path) -> None:
    assert message in refused(estimator_in(tmp_path, source)).message


@pytest.mark.parametrize("settings", LEAVES_OUT)
def test_equal_rewards_are_not_tried_where_no_token_of_them_is_trained_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    name = estimator_in(tmp_path, SKYRL + BY_DEVIATION)
    assert callable(advantage_estimator(AlgorithmConfig(advantage_estimator=name, **settings)))


@pytest.mark.parametrize("size", [2, 7, 9, 64, 256])
def test_rows_may_be_folded_by_the_number_of_answers_to_a_prompt(size: int, nano: Path, tmp_path: Path) -> None:
    folded = f"batch.rewards.view(-1, {size}, batch.rewards.shape[1])"
    name = estimator_in(tmp_path, SKYRL + f"({folded} - {folded}.mean(1, keepdim=True)).view_as(batch.rewards)")
    run = config(nano, tmp_path, trainer__algorithm__advantage_estimator=name, generator__n_samples_per_prompt=size)
    assert not list(custom_algorithms_can_be_called(run))


def test_an_estimator_may_read_what_only_some_runs_have(tmp_path: Path) -> None:
    filled = ("trajectories", "last_step", "teacher_logprobs", "ref_logprobs", "old_logprobs", "values", "baselines")
    given = "".join(f" + 0 * batch.{name}.sum()" for name in (*filled, "answer_lengths", "trajectory_lengths"))
    name = estimator_in(tmp_path, SKYRL + f"batch.rewards{given}")
    assert callable(advantage_estimator(AlgorithmConfig(advantage_estimator=name)))


class Counting:
    """Adds the number of its calls so far."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: TrainingBatch) -> torch.Tensor:
        self.calls += 1
        return batch.rewards + self.calls - 1


def test_the_estimator_of_the_run_has_not_been_called_before(tmp_path: Path) -> None:
    name = estimator_in(tmp_path, f"from {__name__} import Counting as own")
    small = TrainingBatch(
        input_ids=torch.ones(2, 3, dtype=torch.int64),
        lengths=torch.tensor([3, 3]),
        loss_mask=torch.tensor([[False, True, True]] * 2),
        rollout_logprobs=None,
        rewards=torch.ones(2, 3),
        groups=torch.tensor([0, 0]),
    )
    estimate = advantage_estimator(AlgorithmConfig(advantage_estimator=name))
    assert estimate(small).tolist() == [[0.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(("source", "count"), [("batch.rewards.log()", 1), ("batch.rewards", 0)])
@pytest.mark.parametrize("is_registered", [False, True])
def test_it_is_tried_before_the_start(
    source: str, count: int, is_registered: bool, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = estimator_in(tmp_path, SKYRL + source)
    if is_registered:
        monkeypatch.setitem(AdvantageEstimatorRegistry._own, "mine", AdvantageEstimatorRegistry.object(name, {}))
    run = config(nano, tmp_path, trainer__algorithm__advantage_estimator="mine" if is_registered else name)
    assert [problem.path for problem in custom_algorithms_can_be_called(run)] == [FIELD] * count
