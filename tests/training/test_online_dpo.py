"""Online DPO: the gradient of pairs that are ranked by reward is that of a preference run on the same pairs."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import attrs
import pytest
import torch
from torch import Tensor

from skyrl.algorithms.preferences import PairSettings
from skyrl.algorithms.ranked_pairs import OnlineDPOLoss
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig
from skyrl.config.settings.losses import OnlineDPOConfig
from skyrl.learners.workers.learning_worker import weighed
from skyrl.learners.workers.objectives import PreferenceObjective
from skyrl.training.objective import policy_objective
from skyrl.training.online_dpo import RankedPairs
from tests.effects.algorithm import small_batch

LOSSES = get_args(get_type_hints(OnlineDPOConfig)["loss_type"])


class Policy:
    """A policy whose log-probabilities are the old ones of the batch, and which counts the rows that it scores."""

    rows = 0

    async def score(self, batch: TrainingBatch) -> Tensor:
        self.rows += len(batch)
        assert batch.old_logprobs is not None
        return batch.old_logprobs


def graded() -> TrainingBatch:
    """Four answers to each of two prompts, with rewards that order them."""
    batch = small_batch()
    rewards = torch.zeros(8, 6).index_put(
        (torch.arange(8), batch.lengths - 1), torch.tensor([3, 1, 2, 2, 0, 4, 4, 1.0])
    )
    return attrs.evolve(batch, rewards=rewards, groups=torch.arange(8) // 4)


def pairs_of(loss: str = "sigmoid", pairs: Any = "best_worst", beta: float = 0.1) -> RankedPairs:
    return RankedPairs(loss=OnlineDPOLoss(loss_type=loss, beta=beta, pairs=pairs), seed=1)


@pytest.mark.parametrize("pairs", ["best_worst", "all"])
@pytest.mark.parametrize("loss", LOSSES)
async def test_loss_and_gradient_are_those_of_a_preference_run_on_the_same_pairs(loss: str, pairs: str) -> None:
    batch = graded()
    assert batch.old_logprobs is not None
    leaf = batch.old_logprobs.clone().requires_grad_()
    ranked, policy = pairs_of(loss, pairs, beta=0.7), Policy()
    compared, metrics = await ranked.with_pair_advantages(policy, batch)
    objective = policy_objective(AlgorithmConfig(policy_loss_type="online_dpo"))
    mini_batch = weighed(objective, compared)
    kept = (compared.advantages != 0).any(1)  # type: ignore[union-attr]  # they are given
    objective(leaf[kept], mini_batch)[0].backward()
    online = leaf.grad

    other = batch.old_logprobs.clone().requires_grad_()
    chosen = ranked.pairs(batch).flatten()
    offline = PreferenceObjective(losses=((loss, 1.0),), settings=PairSettings(beta=0.7))
    rows = weighed(offline, batch.select(chosen))
    value, parts, _ = offline(other[chosen], rows)
    value.backward()
    torch.testing.assert_close(online, other.grad)
    for name, number in parts.items():
        if f"pairs/{name}" in metrics:
            assert metrics[f"pairs/{name}"] == pytest.approx(number.item(), abs=1e-6)
    assert len(parts.keys() & {name.removeprefix("pairs/") for name in metrics}) == 7
    assert policy.rows == len(set(chosen.tolist()))


async def test_an_answer_of_several_turns_is_compared_as_a_whole() -> None:
    """Rows 0 and 1 are the turns of one answer: their log-probabilities and rewards add up."""
    batch = graded().rows(0, 3)
    last = torch.tensor([False, True, True])
    batch = attrs.evolve(batch, trajectories=torch.tensor([0, 0, 1]), last_step=last, groups=torch.zeros(3).long())
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    compared, metrics = await pairs_of().with_pair_advantages(Policy(), batch)
    ratios = torch.where(batch.loss_mask, batch.old_logprobs - batch.ref_logprobs, 0.0).sum(1)
    assert metrics["pairs/chosen_reward"] == pytest.approx(0.1 * (ratios[0] + ratios[1]).item(), abs=1e-6)
    assert metrics["pairs/rejected_reward"] == pytest.approx(0.1 * ratios[2].item(), abs=1e-6)
    assert compared.advantages is not None
    amounts = compared.advantages.amax(1) + compared.advantages.amin(1)
    assert amounts[0] == amounts[1] == -amounts[2] > 0


def test_pairs_and_what_makes_none_are_counted() -> None:
    batch, silent = graded(), graded().with_fields(rewards=torch.zeros(8, 6))
    assert pairs_of().describe(batch) == {"loss/pairs": 2, "loss/groups_without_a_pair": 0, "loss/tied_answers": 2}
    assert pairs_of(pairs="all").describe(batch)["loss/pairs"] == 10
    assert pairs_of(pairs="random").describe(batch)["loss/pairs"] == 2
    assert pairs_of().describe(silent) == {"loss/pairs": 0, "loss/groups_without_a_pair": 2, "loss/tied_answers": 12}


def test_answers_without_a_trained_token_are_in_no_pair() -> None:
    batch = graded()
    mask = batch.loss_mask.clone()
    mask[0] = False  # the best of the first group
    [best, worst] = pairs_of().pairs(batch.with_fields(loss_mask=mask))[0].tolist()
    assert (best, worst) == (2, 1)


def test_the_marks_of_a_batch_are_1_for_the_better_answer_and_minus_1_for_the_worse() -> None:
    batch = graded()
    marks = torch.where(batch.loss_mask, pairs_of().pair_counts(batch), 0.0)
    assert marks.amax(1).tolist() == [1, 0, 0, 0, 0, 1, 0, 0]
    assert marks.amin(1).tolist() == [0, -1, 0, 0, -1, 0, 0, 0]
