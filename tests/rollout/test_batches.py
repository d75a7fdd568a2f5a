"""How a batch is filled: dynamic sampling, the zero-variance filter, and greedy baselines, on raw rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from skyrl.config import AlgorithmConfig, DynamicSamplingConfig, GeneratorConfig, SamplingParams
from skyrl.data.cursor import PromptCursor
from skyrl.errors import RunError
from skyrl.rollout.batches import SynchronousRollouts
from skyrl.trajectory import Prompt, TrajectoryGroup
from tests.rollout.scripted import Scripted

GOOD, ALL_RIGHT, ALL_WRONG = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)


def rollouts(generator: Any, **algorithm: Any) -> SynchronousRollouts:
    prompts = [Prompt(id=str(number), messages=(), token_ids=(number,), env_class="gsm8k") for number in range(6)]
    return SynchronousRollouts(
        PromptCursor(prompts, 2, seed=0), generator, GeneratorConfig(), AlgorithmConfig(**algorithm), seed=7
    )


def sampling(**settings: Any) -> dict[str, Any]:
    return {"dynamic_sampling": DynamicSamplingConfig(**settings)}


async def test_filter_draws_until_the_batch_is_full_of_groups_that_teach() -> None:
    generator = Scripted([ALL_RIGHT, GOOD], [ALL_WRONG, ALL_WRONG], [GOOD, GOOD])
    source = rollouts(generator, **sampling(type="filter"))
    assert [group.rewards for group in await source.next_batch(3)] == [GOOD, GOOD]
    assert source.metrics() == {
        "generate/sampled_batches": 3,
        "generate/groups_dropped": 3,
        "generate/groups_left_over": 1,
        "generate/groups_without_signal": 3,
        "generate/groups_outside_bands": 0,
    }
    assert [(call["weight_version"], call["attempt"]) for call in generator.asked] == [(3, 0), (3, 1), (3, 2)]


async def test_a_batch_that_is_not_filtered_is_the_first_draw_of_its_version() -> None:
    generator = Scripted([ALL_RIGHT, GOOD])
    assert [group.rewards for group in await rollouts(generator).next_batch(3)] == [ALL_RIGHT, GOOD]
    assert [(call["weight_version"], call["attempt"]) for call in generator.asked] == [(3, 0)]


@pytest.mark.parametrize("unlimited", [0, -1])
async def test_filter_without_a_limit_draws_until_the_batch_is_full(unlimited: int) -> None:
    generator = Scripted([ALL_RIGHT, ALL_WRONG], [GOOD, GOOD])
    source = rollouts(generator, **sampling(type="filter", max_sample_batches=unlimited))
    assert [group.rewards for group in await source.next_batch(0)] == [GOOD, GOOD]


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({}, [(1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0)]),
        ({"min_success_rate": 0.5}, [(1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 0.0, 0.0)]),
        ({"max_success_rate": 0.5}, [(1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0)]),
    ],
)
async def test_filter_leaves_out_prompts_that_are_too_hard_or_too_easy(bounds: Any, kept: Any) -> None:
    generator = Scripted([(1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0)], [(1.0, 1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)])
    source = rollouts(generator, **sampling(type="filter", **bounds))
    assert [group.rewards for group in await source.next_batch(0)] == kept


async def test_filter_gives_up_at_its_limit_and_says_how_far_it_came() -> None:
    generator = Scripted([GOOD, ALL_RIGHT], [ALL_RIGHT, ALL_WRONG])
    source = rollouts(generator, **sampling(type="filter", max_sample_batches=2))
    with pytest.raises(RunError, match=r"drew 2 batches(.|\n)*1 groups of different rewards, 2 are needed"):
        await source.next_batch(0)


async def test_replace_puts_good_groups_in_the_place_of_others() -> None:
    source = rollouts(Scripted([ALL_RIGHT, GOOD]), **sampling(type="replace", min_replace_ratio=0.3))
    assert [group.rewards for group in await source.next_batch(0)] == [GOOD, GOOD]
    assert source.metrics()["generate/groups_replaced"] == 1


async def test_replace_draws_again_where_too_few_groups_are_good() -> None:
    source = rollouts(Scripted([ALL_RIGHT, GOOD], [GOOD, GOOD]), **sampling(type="replace", min_replace_ratio=0.5))
    assert [group.rewards for group in await source.next_batch(0)] == [GOOD, GOOD]
    assert source.metrics()["generate/groups_dropped"] == 2


async def test_replace_gives_up_at_its_limit_and_says_what_was_wanted() -> None:
    draws = [[ALL_RIGHT, ALL_WRONG]] * 3
    source = rollouts(Scripted(*draws), **sampling(type="replace", max_sample_batches=2, min_replace_ratio=0.5))
    with pytest.raises(RunError, match=r"drew 2 batches(.|\n)*a batch of which more than 0.5 had different rewards"):
        await source.next_batch(0)


async def test_a_group_of_one_is_kept() -> None:
    source = rollouts(Scripted([(0.0,), (1.0,)]), **sampling(type="filter", max_sample_batches=1))
    assert len(await source.next_batch(0)) == 2


async def test_the_zero_variance_filter_keeps_the_group_and_takes_its_tokens_out_of_the_loss() -> None:
    source = rollouts(Scripted([ALL_RIGHT, GOOD]), zero_variance_filter=True)
    silent, speaking = await source.next_batch(0)
    assert [row.loss_mask for row in silent.trajectories] == [(0,), (0,)]
    assert [row.loss_mask for row in speaking.trajectories] == [(1,), (1,)]
    assert silent.rewards == ALL_RIGHT
    assert source.metrics() == {"reward/num_zero_variance_filtered": 1}


async def test_rewards_that_differ_by_the_tolerance_are_equal() -> None:
    nearly = (1.0, 1.0 + 1e-7)
    source = rollouts(Scripted([nearly, nearly]), zero_variance_filter=True, zero_variance_filter_tol=1e-6)
    await source.next_batch(0)
    assert source.metrics() == {"reward/num_zero_variance_filtered": 2}


async def test_remax_compares_with_one_greedy_answer_to_each_prompt() -> None:
    generator = Scripted([GOOD, GOOD], [(0.25,), (0.75,)])
    groups = await rollouts(generator, advantage_estimator="remax").next_batch(5)
    assert [group.baseline for group in groups] == [0.25, 0.75]
    greedy = generator.asked[1]
    assert greedy["sampling"] == SamplingParams(temperature=0.0)
    assert (greedy["samples_per_prompt"], greedy["purpose"], greedy["weight_version"]) == (1, "baseline", 5)


async def test_a_group_whose_greedy_answer_could_not_be_judged_is_not_compared_with_0() -> None:
    class OneFails(Scripted):
        async def generate(self, prompts: Sequence[Prompt], **kwargs: Any) -> tuple[TrajectoryGroup, ...]:
            first, second = await super().generate(prompts, **kwargs)
            if kwargs.get("purpose") == "baseline":
                first = evolve(first, trajectories=(evolve(first.trajectories[0], failed=True),))
            return first, second

    source = rollouts(OneFails([GOOD, GOOD], [(0.0,), (0.75,)]), advantage_estimator="remax")
    silent, speaking = await source.next_batch(5)
    assert [row.trained for row in silent.trajectories] == [False, False]
    assert ([row.trained for row in speaking.trajectories], speaking.baseline) == ([True, True], 0.75)
    assert source.metrics() == {"rollout/groups_without_baseline": 1}
