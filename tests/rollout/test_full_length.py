"""Made-up batches: every sample has the greatest length, all of it is trained on, and neighbours differ in reward."""

from __future__ import annotations

import math

from skyrl.rollout.batches import FullLengthRollouts


async def test_made_up_samples_are_trained_on_whole_and_differ_in_reward_from_their_neighbours() -> None:
    rollouts = FullLengthRollouts(prompts=2, samples=3, prompt_tokens=4, answer_tokens=5, vocabulary=7)
    first, second = await rollouts.next_batch(6)
    assert (first.rewards, second.rewards) == ((0.0, 1.0, 0.0), (1.0, 0.0, 1.0))
    for row in (*first.trajectories, *second.trajectories):
        assert (len(row.prompt_ids), len(row.response_ids), row.loss_mask) == (4, 5, (1,) * 5)
        assert [turn.token for turn in row.rewards] == [4]
        assert row.rollout_logprobs == (-math.log(7),) * 5
        assert row.weight_versions == (6,) * 5


async def test_a_made_up_batch_follows_from_its_seed_and_version() -> None:
    rollouts = FullLengthRollouts(prompts=1, samples=2, prompt_tokens=9, answer_tokens=9, vocabulary=1000, seed=3)
    assert await rollouts.next_batch(1) == await rollouts.next_batch(1)
    (one,), (other,) = await rollouts.next_batch(1), await rollouts.next_batch(2)
    assert one.prompt.token_ids != other.prompt.token_ids
