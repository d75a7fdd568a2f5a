"""Bytes of a learner and of an engine, by part, in numbers that fit on a sheet of paper."""

from __future__ import annotations

import attrs

from skyrl.planning.activations import Computing, Pass, layer_bytes, logits_bytes, stream_bytes
from skyrl.planning.known_models import known_shape
from skyrl.planning.memory import Bytes, LearnerRank, Serving, ZeroSettings, learner_memory, resting, total
from skyrl.planning.model_shape import ModelShape

SHAPE = ModelShape(layers=2, hidden=4, intermediate=6, heads=2, key_heads=1, head_size=2, vocabulary=10)
PASS = Pass(rows=2, prompt=3, answer=5, packed=False)
FLOATS, SIXTEEN = Computing(precision="float32"), Computing(precision="bfloat16")
LEARNER = LearnerRank(shape=SHAPE, computing=FLOATS, scoring=PASS, update=PASS, keeps_gradients=False)


def test_a_layer_keeps_what_its_backward_reads() -> None:
    # per token in float32: two norms of 3 x 4, queries and mixed values 4 each, keys and values 2 each, 4 x 6 inside
    assert layer_bytes(SHAPE, PASS, FLOATS) == 16 * 4 * (24 + 8 + 4 + 24)
    # in 16 bits the input of a norm is kept in float32, and two more of it in 16
    assert layer_bytes(SHAPE, PASS, SIXTEEN) == 16 * (2 * 4 * (4 + 4) + 2 * (8 + 4 + 24))
    assert stream_bytes(SHAPE, PASS, SIXTEEN) == 16 * 4 * 2


def test_prompts_are_computed_once_where_they_are_shared() -> None:
    shared = Pass(rows=6, prompt=10, answer=3, packed=True, shares_prompts=True, samples=4)
    assert (shared.prompts, shared.tokens, shared.read) == (2, 20 + 18, 18)
    assert attrs.evolve(shared, sharing=4).tokens == 10  # 38 / 4, rounded up


def test_a_large_table_of_logits_is_cut() -> None:
    wide = attrs.evolve(SHAPE, vocabulary=2**17)
    assert logits_bytes(wide, 512, FLOATS, learns=True) == 512 * 2**17 * 4 * 5  # 2^26 are kept whole
    chunk, gradient = 256 * 2**17 * 4 * 3, 2**17 * 4 * 4
    assert logits_bytes(wide, 513, FLOATS, learns=True) == chunk + gradient
    assert logits_bytes(wide, 513, FLOATS, learns=False) == chunk


def test_weights_and_adam_rest_over_the_ranks_that_share_them() -> None:
    weights = SHAPE.parameters
    assert resting(LEARNER) == {"parameters": 4 * weights, "optimizer": 8 * weights}
    assert total(resting(attrs.evolve(LEARNER, shards=4))) == 3 * weights
    assert resting(attrs.evolve(LEARNER, states=0))["optimizer"] == 0


def test_zero_has_masters_beside_what_it_computes_with() -> None:
    def rests(stage: int) -> Bytes:
        zero = ZeroSettings(stage=stage, bucket=100, persistent=0)
        return resting(attrs.evolve(LEARNER, computing=SIXTEEN, shards=2, zero=zero))

    weights = SHAPE.parameters
    assert rests(2) == {"parameters": 2 * weights, "optimizer": 6 * weights}
    assert rests(3) == {"parameters": weights, "gradients": weights, "optimizer": 6 * weights, "overhead": 200}


def test_a_rank_gathers_the_experts_of_no_other_rank() -> None:
    replicated = attrs.evolve(LEARNER, shards=2, shape=attrs.evolve(SHAPE, experts=4, experts_per_token=1))
    spread = attrs.evolve(replicated, expert_parallel=2)
    # of four experts of three matrices of 4 x 6, two are elsewhere
    assert replicated.gathered_layer - spread.gathered_layer == 2 * 3 * 24
    assert resting(replicated) == resting(spread)
    gathered = [learner_memory(learner)["scoring"]["parameters"] for learner in (replicated, spread)]
    assert gathered[0] - gathered[1] == 4 * 2 * (2 * 3 * 24)  # of two layers, in float32


def test_a_frozen_model_is_its_weights() -> None:
    reference = attrs.evolve(LEARNER, update=None)
    assert list(learner_memory(reference)) == ["scoring"]
    assert resting(reference)["optimizer"] == 0


def test_recomputation_keeps_one_layer() -> None:
    deep = attrs.evolve(LEARNER, shape=attrs.evolve(SHAPE, layers=40), update=attrs.evolve(PASS, rows=200))
    kept = learner_memory(deep)["update"]["activations"]
    recomputed = learner_memory(attrs.evolve(deep, recomputes=True))["update"]["activations"]
    assert recomputed < kept / 5


def test_more_work_never_takes_less() -> None:
    shape = known_shape("Qwen/Qwen2.5-0.5B")
    assert shape is not None
    for computing in (FLOATS, SIXTEEN):
        learner = attrs.evolve(LEARNER, shape=shape, computing=computing)
        sizes = [
            total(learner_memory(attrs.evolve(learner, update=attrs.evolve(PASS, rows=rows)))["update"])
            for rows in (1, 2, 4, 8, 64, 512)
        ]
        assert sizes == sorted(sizes)


def test_an_engine_fills_its_share_with_keys_and_values() -> None:
    serving = Serving(shape=SHAPE, sequences=8, length=10, step_tokens=4, budget=10_000)
    assert serving.cache == 10_000 - 2 * SHAPE.parameters - serving.computing
    assert serving.sequence_bytes == 2 * 2 * 2 * 2 * 10
    assert attrs.evolve(serving, budget=0).sequences_of_full_length == 0
    assert attrs.evolve(serving, budget=None).cache == 8 * serving.sequence_bytes
