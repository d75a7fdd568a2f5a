"""Seconds under Megatron-core, by hand: the bubble of a pipeline, its slowest stage, and what ranks send."""

from __future__ import annotations

import pytest
from attrs import evolve

from skyrl.planning.activations import Computing, Pass
from skyrl.planning.memory import LearnerRank, MegatronSharding
from skyrl.planning.model_shape import ModelShape
from skyrl.planning.roofline import (
    LATENCY,
    PassRows,
    Rates,
    Sharding,
    Stages,
    bubble,
    forward_flops,
    scoring_seconds,
    stage_scoring_seconds,
    stage_update_seconds,
)

SHAPE = ModelShape(layers=4, hidden=8, intermediate=16, heads=2, key_heads=1, head_size=4, vocabulary=100)
RATES = Rates(flops=1e6, bandwidth=1e6, link=1e4, node_link=1e3, gpus_per_node=2)
SLOW = evolve(RATES, flops=1e3, link=1e12, node_link=1e12, bandwidth=1e12)
"""Products take so long here that nothing else shows."""

ROWS = PassRows(tokens=1000, length=10, micro_batches=6)
ALONE = Sharding(data=1, shards=1)
PASS = Pass(rows=1, prompt=5, answer=5, packed=False)
LEARNER = LearnerRank(
    shape=SHAPE, computing=Computing(precision="bfloat16"), scoring=PASS, update=PASS, megatron=MegatronSharding()
)


@pytest.mark.parametrize(("stages", "micro_batches", "share"), [(1, 1, 0), (4, 1, 3 / 4), (2, 3, 1 / 4), (4, 9, 1 / 4)])
def test_the_bubble_is_a_micro_batch_for_each_other_stage(stages: int, micro_batches: int, share: float) -> None:
    assert bubble(stages, micro_batches) == share


def test_one_stage_alone_takes_what_any_rank_does() -> None:
    assert stage_scoring_seconds(SHAPE, ROWS, Stages(sharding=ALONE), RATES) == scoring_seconds(
        SHAPE, ROWS, ALONE, RATES
    )


def test_stages_divide_the_layers_and_wait_while_the_pipeline_fills_and_drains() -> None:
    head = 2 * 1000 * 100 * 8
    slowest = (forward_flops(SHAPE, ROWS) - head) / 2 + head
    seconds = stage_scoring_seconds(SHAPE, ROWS, Stages(sharding=ALONE, number=2), SLOW)
    assert seconds == pytest.approx(slowest / 1e3 * (6 + 2 - 1) / 6, rel=1e-6)
    three = stage_scoring_seconds(SHAPE, ROWS, Stages(sharding=ALONE, number=3), SLOW)
    assert three == pytest.approx(slowest / 1e3 * (6 + 3 - 1) / 6, rel=1e-6), "one of three has two of the four layers"


def test_each_optimizer_step_fills_the_pipeline_anew() -> None:
    learner, stages = evolve(LEARNER, megatron=MegatronSharding(stages=2)), Stages(sharding=ALONE, number=2)
    once, thrice = (stage_update_seconds(learner, ROWS, stages, SLOW, steps=steps) for steps in (1, 3))
    assert thrice / once == pytest.approx((1 + 1 / 2) / (1 + 1 / 6), rel=1e-6)
    recomputed = stage_update_seconds(evolve(learner, recomputes=True), ROWS, stages, SLOW)
    assert recomputed / once == pytest.approx(4 / 3, rel=1e-6)


def test_gradients_and_weights_cross_the_link_once_an_optimizer_step() -> None:
    quick = evolve(RATES, flops=1e12)
    stages = Stages(sharding=Sharding(data=2, shards=1))
    spread = evolve(LEARNER, megatron=MegatronSharding(sharing_states=2))
    two, one = (stage_update_seconds(spread, ROWS, stages, quick, steps=steps) for steps in (2, 1))
    sent = (4 + 2) * SHAPE.parameters / 2 / RATES.link
    assert two - one == pytest.approx(sent + 7 * 4 * SHAPE.parameters / 2 / RATES.bandwidth)


def test_tokens_go_to_their_experts_and_come_back() -> None:
    mixture, quick = evolve(SHAPE, experts=4, experts_per_token=2), evolve(RATES, flops=1e12)
    local, spread = Stages(sharding=Sharding(data=2, shards=1)), Stages(sharding=Sharding(data=2, shards=1), experts=2)
    spread_seconds, without = (stage_scoring_seconds(mixture, ROWS, stages, quick) for stages in (spread, local))
    moved = 2 * (1 / 2) * 500 * 2 * 8 * 2 / RATES.link
    assert spread_seconds - without == pytest.approx(4 * (moved + 2 * 6 * LATENCY))


def test_a_stage_hands_its_hidden_states_on() -> None:
    quick = evolve(RATES, flops=1e12, node_link=1e-3)
    both = Stages(sharding=Sharding(data=1, shards=1), number=2)
    rows = evolve(ROWS, micro_batches=1)
    near = stage_scoring_seconds(SHAPE, rows, both, quick)
    far = stage_scoring_seconds(SHAPE, rows, both, evolve(quick, gpus_per_node=1))
    assert far - near == pytest.approx(2 * 1000 * 8 * 2 * (1 / 1e-3 - 1 / 1e4)), (
        "over another machine, in twice the time"
    )
