"""How the rows of a batch are dealt to ranks, and how what they report is put together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.algorithms.reductions import token_mean
from skyrl.batch import TrainingBatch
from skyrl.config import TrainerConfig
from skyrl.data.tokenized_rows import PreferenceRow
from skyrl.learners.budget import TokenBudget
from skyrl.learners.rank_metrics import Moments, RankMetrics
from skyrl.learners.ranks import Ranks, Rendezvous
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.group import ScorerGroup, deal
from skyrl.learners.workers.learning_worker import Objective
from skyrl.learners.workers.objectives import BradleyTerry, CrossEntropy
from skyrl.planning.replicas import Replicas
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.training.collate import collate_pairs
from skyrl.training.objective import policy_objective
from skyrl.training.trainer import AS_CONFIGURED
from tests.learners.rows import LENGTHS, batch
from tests.learners.updating import LearnerGroup, PolicyWorker


def test_rows_are_dealt_in_order_and_equal_numbers() -> None:
    shares = deal(batch(6), 3)
    assert [share.lengths.tolist() for share in shares] == [[5, 12], [8, 12], [6, 9]]


def test_where_rows_do_not_divide_the_last_is_repeated_without_weight() -> None:
    rows = batch(5)
    shares = deal(rows.with_fields(loss_weights=token_mean(rows.loss_mask)), 2)
    assert [share.lengths.tolist() for share in shares] == [list(LENGTHS[:3]), [12, 6, 6]]
    weights = [share.loss_weights for share in shares]
    assert weights[1] is not None and not weights[1][2].any() and not shares[1].loss_mask[2].any()
    torch.testing.assert_close(sum(weight.sum() for weight in weights if weight is not None), torch.tensor(1.0))
    assert rows.loss_mask[4].any(), "the batch itself is as it was"


def test_the_rows_of_an_item_stay_on_one_replica() -> None:
    pairs = batch(6).with_fields(groups=torch.tensor([0, 0, 1, 1, 2, 2]))
    shares = deal(pairs, 2, rows_of_an_item=2)
    assert [share.lengths.tolist() for share in shares] == [[5, 12, 8, 12], [6, 9, 6, 9]]
    assert [share.groups.tolist() for share in shares] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert shares[1].loss_mask.any(1).tolist() == [True, True, False, False]


def test_pairs_stay_in_one_micro_batch_where_one_fills_up_a_rank() -> None:
    lengths = (9, 8, 3)  # of the chats of each pair: two of the first rank's do not fit together
    rows = [
        PreferenceRow(id=str(number), chosen=np.full(length, number), rejected=np.full(length, number + 9))
        for number, length in enumerate(lengths)
    ]
    shares = TokenBudget(tokens=24).plan(deal(collate_pairs(rows), 2, rows_of_an_item=2))
    plans = [share.micro_batches.tolist() for share in shares if share.micro_batches is not None]
    assert len(plans) == 2
    for plan in plans:
        assert plan[0] == plan[1] != plan[2] == plan[3]


async def test_a_pair_that_fills_up_a_rank_counts_in_no_mean() -> None:
    mask = torch.tensor([[False, True], [False, True], [False, False], [False, False]])
    ids = torch.zeros(4, 2, dtype=torch.long)
    pairs = evolve(batch(4), input_ids=ids, lengths=torch.tensor([2] * 4), loss_mask=mask, rewards=torch.zeros(4, 2))
    weighed = pairs.with_fields(loss_weights=mask.float())  # of the whole batch, which has one pair
    values = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    loss, _, numbers = BradleyTerry()(values, weighed)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-2)))
    assert {name: set(tensor.tolist()) for name, tensor in numbers.items()} == {
        "accuracy": {1.0},
        "margin": {2.0},
        "chosen_score": {3.0},
        "rejected_score": {1.0},
    }


class FakeRank:
    """Scores a row by its length, and learns the number of its rows."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.shares: list[TrainingBatch] = []
        self.asked = 0

    def shapes(self, adapter: bool) -> list[tuple[str, tuple[int, ...]]]:
        self.asked += 1
        return [("adapter" if adapter else "weight", (2, 3))]

    async def score(self, share: TrainingBatch) -> Tensor:
        self.shares.append(share)
        scored = share.lengths.float().unsqueeze(1).expand(share.input_ids.shape)
        return scored if self.ranks.reports else scored[:0]

    async def forward_backward_share(self, share: TrainingBatch, objective: Objective) -> RankMetrics:
        self.shares.append(share)
        seen = {"tokens": Moments.from_tensor(share.lengths.float())}
        return RankMetrics(sums={"rows": float(len(share))}, moments=seen)

    async def optimizer_step(self, settings: StepSettings) -> dict[str, float]:
        return {"grad_norm": 1.0}


PLACEMENTS = {
    "two tensor ranks of each replica": (Replicas((0, 0, 1, 1)), [[5, 12], [5, 12], [8, 12], [8, 12]]),
    "two stages of each replica": (Replicas((0, 1, 0, 1)), [[5, 12], [8, 12], [5, 12], [8, 12]]),
    "replicas in another order": (Replicas((1, 1, 0, 0)), [[8, 12], [8, 12], [5, 12], [5, 12]]),
}
"""2 x 2 ranks, and the lengths of the rows that each gets."""


def fakes(replicas: Replicas) -> list[FakeRank]:
    with Rendezvous() as rendezvous:
        return [FakeRank(ranks) for ranks in rendezvous.ranks("policy", len(replicas.of_rank), replicas)]


def group_of(ranks: list[FakeRank]) -> Group[Any]:
    return Group([LocalHandle(f"rank-{number}", rank) for number, rank in enumerate(ranks)])


@pytest.mark.parametrize("name", PLACEMENTS)
async def test_the_ranks_of_a_replica_get_the_same_rows_and_one_of_them_reports(name: str) -> None:
    replicas, shares = PLACEMENTS[name]
    ranks = fakes(replicas)
    scores = await ScorerGroup(group_of(ranks), replicas=replicas).score(batch(4))
    assert scores[:, 0].tolist() == [5.0, 12.0, 8.0, 12.0]
    assert [rank.shares[0].lengths.tolist() for rank in ranks] == shares
    assert sum(rank.ranks.reports for rank in ranks) == 2


@pytest.mark.parametrize("name", PLACEMENTS)
async def test_what_a_replica_reports_counts_once(name: str) -> None:
    replicas, _ = PLACEMENTS[name]
    learner = LearnerGroup(group_of(fakes(replicas)), CrossEntropy(), replicas=replicas)
    assert await learner.update(batch(4)) == {"rows": 4.0, "grad_norm": 1.0, "tokens": 9.25}


async def test_ranks_are_asked_once_for_the_names_and_shapes_of_their_weights() -> None:
    replicas, _ = PLACEMENTS["two stages of each replica"]
    ranks = fakes(replicas)
    learner = LearnerGroup(group_of(ranks), CrossEntropy(), replicas=replicas)
    for _ in range(2):
        assert await learner.shapes() == [("weight", (2, 3))]
        assert await learner.shapes(adapter=True) == [("adapter", (2, 3))]
    assert [rank.asked for rank in ranks] == [2, 2, 2, 2]


async def test_a_budget_of_tokens_is_planned_once_for_a_replica() -> None:
    replicas, _ = PLACEMENTS["two stages of each replica"]
    ranks = fakes(replicas)
    budget = TokenBudget(tokens=13, keep_groups=False)
    await ScorerGroup(group_of(ranks), budget, replicas=replicas).score(batch(4))
    plans = [rank.shares[0].micro_batches for rank in ranks]
    assert [plan is not None and plan.max() for plan in plans] == [1] * 4  # 5 + 12 and 8 + 12 are too many
    assert plans[0] is plans[2] and plans[1] is plans[3]


async def test_a_rank_that_does_not_report_learns_and_returns_no_rows(small: TrainerConfig) -> None:
    objective = policy_objective(small.algorithm)
    silent = PolicyWorker(small, objective, ranks=Ranks(reports=False))
    twin = PolicyWorker(small, objective)
    rows = objective.weigh(batch(2).with_fields(ref_logprobs=torch.zeros(2, 12)))
    assert (await silent.score(rows)).shape == (0, 12)
    for learner in (silent, twin):
        await learner.forward_backward_share(rows, objective)
        await learner.optimizer_step(AS_CONFIGURED)
    torch.testing.assert_close(dict(silent.weights()), dict(twin.weights()))


async def test_an_update_packs_rows_over_all_replicas() -> None:
    replicas, _ = PLACEMENTS["two stages of each replica"]
    ranks = fakes(replicas)
    budget = TokenBudget(tokens=17, keep_groups=False)
    learner = LearnerGroup(group_of(ranks), CrossEntropy(), budget, replicas=replicas)
    await learner.update(batch(4))  # 5, 12, 8 and 12 tokens
    shares = [rank.shares[0] for rank in ranks]
    plans = [share.micro_batches.tolist() for share in shares if share.micro_batches is not None]
    assert [share.lengths.tolist() for share in shares] == [[12, 8], [5, 12]] * 2
    assert plans == [[0, 1], [1, 0]] * 2
