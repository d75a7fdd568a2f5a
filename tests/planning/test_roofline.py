"""Seconds of a phase, by hand: operations, bytes and links over their speeds."""

from __future__ import annotations

import pytest
from attrs import evolve

from skyrl.planning.gpus import GPU_KINDS
from skyrl.planning.memory import Serving
from skyrl.planning.model_shape import ModelShape
from skyrl.planning.roofline import (
    HALVED,
    LATENCY,
    LAUNCHES,
    AnswerWork,
    PassRows,
    Rates,
    Sharding,
    forward_flops,
    generation_seconds,
    rates_of,
    scoring_seconds,
    transfer_seconds,
    turns_seconds,
    update_seconds,
)

SHAPE = ModelShape(layers=2, hidden=8, intermediate=16, heads=2, key_heads=1, head_size=4, vocabulary=100, tied=True)
"""656 weights a layer, of which 640 are in products; 2,120 in all, 2,112 of them in products."""

RATES = Rates(flops=1e6, bandwidth=1e6, link=1e4, node_link=1e3, host_link=1e5, gpus_per_node=2)
ROWS = PassRows(tokens=1000, length=10, micro_batches=1)
ALONE = Sharding(data=1, shards=1)
SLOW = evolve(RATES, flops=1e3)
"""Products take so long here that nothing else shows."""


def test_a_token_costs_two_operations_a_weight_and_attention_over_half_a_sequence() -> None:
    weights = SHAPE.active_parameters
    assert weights == 2 * (64 + 2 * 32 + 64 + 3 * 128 + 16) + 800
    assert forward_flops(SHAPE, ROWS) == 1000 * (2 * weights + 2 * 10 * 8 * 2)


def test_products_alone_take_three_forward_passes_and_a_fourth_with_recomputation() -> None:
    forward = forward_flops(SHAPE, ROWS) / SLOW.flops
    step = 7 * 4 * SHAPE.parameters / RATES.bandwidth
    assert scoring_seconds(SHAPE, ROWS, ALONE, SLOW) == forward
    assert update_seconds(SHAPE, ROWS, ALONE, SLOW) == 3 * forward + step
    assert update_seconds(SHAPE, ROWS, ALONE, SLOW, recomputes=True) == 4 * forward + step


def test_an_adapter_has_no_products_for_other_weights_and_a_small_step() -> None:
    forward = forward_flops(SHAPE, ROWS) / SLOW.flops
    assert update_seconds(SHAPE, ROWS, ALONE, SLOW, adapter=100) == 2 * forward + 7 * 4 * 100 / RATES.bandwidth


def test_cores_that_also_send_and_start_kernels_do_one_after_the_other() -> None:
    degrees = Sharding(data=2, shards=2)
    quick = evolve(RATES, flops=1e15, link=1e15, latency=0.0, launches=0.0)
    computing, sending, starting = (
        scoring_seconds(SHAPE, ROWS, degrees, rates)
        for rates in (evolve(quick, flops=1e6), evolve(quick, link=1e4), evolve(quick, launches=0.5))
    )
    slow = evolve(RATES, latency=0.0, launches=0.5)
    one_by_one = scoring_seconds(SHAPE, ROWS, degrees, evolve(slow, overlaps=False))
    assert one_by_one == pytest.approx(computing + sending + starting)
    assert scoring_seconds(SHAPE, ROWS, degrees, slow) == pytest.approx(max(computing, sending, starting))


def test_kernels_of_many_small_micro_batches_are_started_for_longer_than_they_compute() -> None:
    rows, quick = PassRows(tokens=10, length=1, micro_batches=5), evolve(RATES, flops=1e12)
    assert scoring_seconds(SHAPE, rows, ALONE, quick) == 5 * 2 * LAUNCHES


def test_shards_are_gathered_for_each_micro_batch_over_the_slower_link_of_several_machines() -> None:
    rows, quick = PassRows(tokens=10, length=1, micro_batches=3), evolve(RATES, flops=1e12)
    one_machine, two = Sharding(data=2, shards=2), Sharding(data=4, shards=4)
    sent = 2 * SHAPE.parameters
    assert scoring_seconds(SHAPE, rows, one_machine, quick) == 3 * (sent / 2 / 1e4 + 2 * LATENCY)
    assert scoring_seconds(SHAPE, rows, two, quick) == 3 * (sent * 3 / 4 / 1e3 + 2 * LATENCY)


def test_copies_of_shards_on_one_machine_send_less_between_machines_than_shards_over_all() -> None:
    spread, copied = Sharding(data=4, shards=4), Sharding(data=4, shards=2)
    assert update_seconds(SHAPE, ROWS, copied, RATES) < update_seconds(SHAPE, ROWS, spread, RATES)


def test_whole_weights_are_sent_once_a_step_and_not_for_each_micro_batch() -> None:
    degrees, rows = Sharding(data=2, shards=2), PassRows(tokens=1000, length=10, micro_batches=50)
    seconds = update_seconds(SHAPE, rows, degrees, RATES)
    assert update_seconds(SHAPE, rows, degrees, RATES, gathers_once=True) < seconds


def test_ranks_that_cut_matrices_wait_for_four_times_a_token_and_lose_some_of_their_rate() -> None:
    degrees = Sharding(data=1, tensor=2, shards=2)
    sent = 2 * 2 * 2 * (1 / 2) * 1000 * 8 / 1e4
    computing = forward_flops(SHAPE, ROWS) / 2 / (RATES.flops * HALVED)
    assert abs(scoring_seconds(SHAPE, ROWS, degrees, RATES) - computing - 2 * (sent + 2 * LATENCY)) < 1e-9


def test_states_in_host_memory_cross_its_link_in_each_optimizer_step() -> None:
    on_device = update_seconds(SHAPE, ROWS, ALONE, RATES, steps=3)
    on_host = update_seconds(SHAPE, ROWS, ALONE, RATES, steps=3, states_on_host=True)
    numbers = 4 * SHAPE.parameters
    assert abs(on_host - on_device - 3 * numbers * (8 / RATES.host_link - 7 / RATES.bandwidth)) < 1e-9


def serving(shape: ModelShape = SHAPE, gpus: int = 1) -> Serving:
    return Serving(shape=shape, gpus=gpus, sequences=64, length=100, step_tokens=100, budget=10**9)


def test_decoding_reads_the_weights_once_for_all_sequences_and_keys_for_each() -> None:
    answers = AnswerWork(number=4, prompts=0, prompt=10, mean=20, longest=20)
    read = 2 * SHAPE.active_parameters + 4 * (10 + 20 / 2) * 2 * 2 * 4 * 2
    quick = evolve(RATES, flops=1e12)
    assert abs(generation_seconds(answers, serving(), 4, quick) - 20 * read / RATES.bandwidth) < 1e-9


def test_half_as_many_at_once_take_two_waves() -> None:
    answers = AnswerWork(number=8, prompts=0, prompt=0, mean=20, longest=20)
    one, two = (generation_seconds(answers, serving(), at_once, SLOW) for at_once in (8, 4))
    assert abs(one - two) < 1e-9  # products bound both
    quick = evolve(RATES, flops=1e12)
    assert generation_seconds(answers, serving(), 4, quick) > generation_seconds(answers, serving(), 8, quick)


def test_the_longest_answer_keeps_the_engine() -> None:
    even = AnswerWork(number=8, prompts=0, prompt=0, mean=20, longest=20)
    quick = evolve(RATES, flops=1e12)
    tail = generation_seconds(evolve(even, longest=50), serving(), 8, quick) - generation_seconds(
        even, serving(), 8, quick
    )
    late = 2 * SHAPE.active_parameters + 2 * 50 * serving().token_bytes
    assert abs(tail - 30 * late / RATES.bandwidth) < 1e-9


def test_few_sequences_of_a_mixture_read_few_experts() -> None:
    mixture = evolve(SHAPE, experts=8, experts_per_token=1)
    quick = evolve(RATES, flops=1e12)

    def seconds(sequences: int) -> float:
        answers = AnswerWork(number=sequences, prompts=0, prompt=0, mean=1, longest=1)
        keys = sequences * 0.5 * serving(mixture).token_bytes / RATES.bandwidth
        return generation_seconds(answers, serving(mixture), sequences, quick) - keys

    expert = 2 * 3 * 8 * 16 * 2 / RATES.bandwidth
    assert abs(seconds(2) - seconds(1) - expert * (8 * (1 - (7 / 8) ** 2) - 1)) < 1e-9


def test_keys_are_held_twice_where_there_are_more_gpus_than_heads_of_keys() -> None:
    assert serving(gpus=2).token_bytes * 2 == evolve(serving(gpus=2), copies=2).token_bytes


def test_weights_cross_the_link_to_the_engine_and_states_go_to_the_host_and_back() -> None:
    assert transfer_seconds(SHAPE, ALONE, RATES, across=False) == 2 * SHAPE.parameters / RATES.link
    assert transfer_seconds(SHAPE, ALONE, RATES, across=True) == 2 * SHAPE.parameters / RATES.node_link
    assert turns_seconds(1000, RATES) == 2 * 1000 / RATES.host_link


def test_a_kind_without_a_fast_link_has_none_between_machines_either() -> None:
    slow = rates_of(GPU_KINDS["L40S"])
    assert slow.node_link == slow.link
