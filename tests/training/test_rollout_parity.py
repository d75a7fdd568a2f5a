"""Engines are compared with the learner on the samples that it trains on, each on its own."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.batch import TrainingBatch
from skyrl.errors import WeightSyncError
from skyrl.learners.forward import by_engine
from skyrl.learners.rank_metrics import RankMetrics, merge_metrics
from skyrl.learners.workers.learning_worker import Objective
from skyrl.training.collate import collate
from skyrl.training.middleware import RolloutParity
from tests.training.test_metrics import answer, group

Metrics = dict[str, float]


def parity(*results: Metrics, bound: float | None = 0.1, versions: tuple[int, ...] = (3,)) -> list[Metrics]:
    """What is left of the metrics of each update, where the first one of each version follows a batch of samples."""
    metrics, queue = [], list(results)
    compared = RolloutParity(bound)

    async def forward_backward(batch: TrainingBatch, objective: Objective) -> Metrics:
        return queue.pop(0)

    async def steps() -> None:
        for version in versions:
            compared.sampled((), version)
            for _ in range(len(results) // len(versions)):
                batch: Any = None
                metrics.append(await compared.around(forward_backward)(batch, batch))

    asyncio.run(steps())
    return metrics


def of(engine: int, mean: float, tokens: int) -> Metrics:
    return {f"parity/{engine}/nats": mean * tokens, f"parity/{engine}/tokens": float(tokens)}


def test_an_engine_that_is_as_near_as_rounding_leaves_no_trace() -> None:
    assert parity({"loss": 1.0, **of(0, 0.09, 300), **of(1, 0.01, 5)}) == [{"loss": 1.0}]


@pytest.mark.parametrize("wrong", [0, 1, 7])
def test_one_engine_of_several_that_is_far_is_named_with_its_version(wrong: int) -> None:
    right = [of(number, 0.01, 10_000) for number in (0, 1, 7) if number != wrong]
    with pytest.raises(WeightSyncError, match=rf"^engine {wrong} does not compute .* version 3 .* by 0.5"):
        parity(right[0] | right[1] | of(wrong, 0.5, 300))


def test_only_the_first_update_after_a_batch_was_sampled_is_read() -> None:
    later = of(0, 5.0, 1000)  # the learner has moved on
    assert parity(of(0, 0.01, 1000), later, later) == [{}, {}, {}]


def test_few_tokens_wait_for_those_of_the_next_steps() -> None:
    with pytest.raises(WeightSyncError, match=r"version 5 .* by 0.3 nats on average over 300 tokens"):
        parity(*[of(0, 0.3, 100)] * 3, versions=(3, 4, 5))
    assert parity(*[of(0, 0.3, 100)] * 2, versions=(3, 4)) == [{}, {}]


def test_not_a_number_is_no_agreement() -> None:
    with pytest.raises(WeightSyncError, match="by nan nats"):
        parity(of(0, math.nan, 300))


def test_a_run_whose_learner_scores_otherwise_compares_nothing() -> None:
    assert parity(of(0, 5.0, 1000), bound=None) == [{}]


def test_distances_are_added_up_for_each_engine_over_rows_and_ranks() -> None:
    distance, engines = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 1, 0, -1])
    distances = by_engine(distance, engines, (0, 1))
    assert {name: value.item() for name, value in distances.items()} == {
        "parity/0/nats": 5.0,
        "parity/0/tokens": 2.0,
        "parity/1/nats": 2.0,
        "parity/1/tokens": 1.0,
    }
    ranks = [{name: value.item() for name, value in distances.items()}, of(2, 3.0, 4)]  # a rank has no row of engine 0
    merged = merge_metrics([RankMetrics(sums=sums, moments={}) for sums in ranks])
    assert merged.metrics() == ranks[0] | ranks[1]


def test_rows_of_older_weights_and_of_unknown_engines_are_not_compared() -> None:
    tokens: dict[str, Any] = {"prompt_ids": (1,), "response_ids": (2, 3), "loss_mask": (1, 1)}
    tokens["rollout_logprobs"] = (-1.0, -1.0)
    current, older, mixed, unknown = (
        evolve(answer("11", 0.0), **tokens, weight_versions=versions, engines=engines)
        for versions, engines in (((4, 4), (2, 2)), ((3, 3), (2, 2)), ((3, 4), (2, 2)), ((4, 4), ()))
    )
    batch = collate([group(current, older, mixed, unknown)], 4)
    assert batch.engines is not None
    assert batch.engines.tolist() == [[-1, 2, 2], [-1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert collate([group(older, unknown)], 4).engines is None
