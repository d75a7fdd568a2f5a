"""Seconds of a model's phases under Megatron-core, by the roofline model of `skyrl.planning.roofline`.

The slowest stage sets the pace. A pass of m micro-batches through p stages takes as long as m + p - 1 micro-batches on
one stage: the share (p - 1) / (m + p - 1) of it is a bubble in which a stage waits, under 1F1B as under any schedule
without interleaving (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from attrs import evolve, frozen

from skyrl.planning.megatron_memory import stage_trained
from skyrl.planning.memory import LearnerRank
from skyrl.planning.model_shape import ModelShape
from skyrl.planning.roofline import (
    FLOAT,
    SIXTEEN_BITS,
    PassRows,
    Rates,
    Sharding,
    exchanging,
    forward_flops,
    ring,
)


@frozen(kw_only=True)
class Stages:
    """How the ranks of a model under Megatron-core divide its work; all pipeline stages have equally many ranks."""

    sharding: Sharding
    """The ranks of one stage."""

    number: int = 1
    experts: int = 1
    """Number of ranks of a stage over which the experts of a layer are distributed."""


def bubble(stages: int, micro_batches: int) -> float:
    """Share of a pass in which a stage waits for the others, for `micro_batches` going through `stages` stages."""
    return (stages - 1) / (micro_batches + stages - 1)


def stage_scoring_seconds(shape: ModelShape, rows: PassRows, stages: Stages, rates: Rates) -> float:
    """Seconds of a forward pass of all rows."""
    working = _working(shape, rows, stages, rates, passes=1, flops=1)
    return working / (1 - bubble(stages.number, rows.micro_batches))


def stage_update_seconds(
    learner: LearnerRank, rows: PassRows, stages: Stages, rates: Rates, *, steps: int = 1
) -> float:
    """Seconds of forward and backward passes of all rows, and of `steps` optimizer steps, each of which reduces
    gradients once and gathers the updated weights.
    """
    backward = (1 if learner.adapter_rank else 2) + learner.recomputes
    working = _working(learner.shape, rows, stages, rates, passes=2 + learner.recomputes, flops=1 + backward)
    filled = working / (1 - bubble(stages.number, max(1, rows.micro_batches // steps)))
    dense, experts = stage_trained(learner)
    spread = learner.megatron
    assert spread is not None, "another strategy"
    sent = (spread.gradient_size + SIXTEEN_BITS) * (
        ring(spread.sharing_states) * dense + ring(spread.sharing_expert_states) * experts
    )
    stepped = FLOAT * (dense / spread.sharing_states + experts / spread.sharing_expert_states)
    return filled + steps * (sent / rates.link_among(stages.sharding.ranks) + 7 * stepped / rates.bandwidth)


def _working(shape: ModelShape, rows: PassRows, stages: Stages, rates: Rates, *, passes: int, flops: int) -> float:
    """Seconds of the slowest stage without the bubble: the one with the most layers and the output matrix."""
    layers = -(-shape.layers // stages.number)
    head = 2.0 * rows.tokens * shape.vocabulary * shape.hidden
    inner = (forward_flops(shape, rows) - head) * layers / shape.layers
    sharding = stages.sharding
    products = flops * (inner + head) / sharding.ranks / rates.cut(sharding.tensor).flops
    launching = passes * rows.micro_batches * layers * rates.launches
    waiting = exchanging(evolve(shape, layers=layers), rows, sharding, rates, passes=passes)
    return (
        rates.combined(products, launching)
        + waiting
        + passes * (_dispatching(shape, rows, stages, rates) * layers + _handing_on(shape, rows, stages, rates))
    )


def _dispatching(shape: ModelShape, rows: PassRows, stages: Stages, rates: Rates) -> float:
    """Seconds to send the tokens of one layer to the ranks of their experts and back."""
    if not shape.experts or stages.experts == 1:
        return 0.0
    copies = rows.tokens / stages.sharding.ranks * shape.experts_per_token
    moved = 2 * ring(stages.experts) * copies * shape.hidden * SIXTEEN_BITS / rates.link_among(stages.experts)
    return moved + 2 * rows.micro_batches * rates.latency


def _handing_on(shape: ModelShape, rows: PassRows, stages: Stages, rates: Rates) -> float:
    """Seconds to send hidden states from a stage to the next one."""
    if stages.number == 1:
        return 0.0
    moved = rows.tokens / stages.sharding.ranks * shape.hidden * SIXTEEN_BITS
    return moved / rates.link_among(2 * stages.sharding.ranks) + rows.micro_batches * rates.latency
