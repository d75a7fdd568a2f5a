"""Bytes of a rank under Megatron-core, in numbers that fit on a sheet of paper."""

from __future__ import annotations

import attrs

from skyrl.planning.activations import Computing, Pass, layer_bytes, stream_bytes
from skyrl.planning.megatron_memory import stage_memory, stage_resting
from skyrl.planning.memory import LearnerRank, MegatronSharding
from skyrl.planning.model_shape import ModelShape

SHAPE = ModelShape(layers=4, hidden=4, intermediate=6, heads=2, key_heads=2, head_size=2, vocabulary=10)
LAYER, TABLE = 4 * 16 + 3 * 24 + 2 * 4, 40  # four matrices of attention, three of the feed-forward part, two norms
PASS = Pass(rows=2, prompt=3, answer=5, packed=False)
SIXTEEN = Computing(precision="bfloat16")
LEARNER = LearnerRank(
    shape=SHAPE, computing=SIXTEEN, scoring=PASS, update=PASS, keeps_gradients=False, megatron=MegatronSharding()
)


def test_weights_are_in_the_type_of_the_computation_beside_masters_and_two_states() -> None:
    weights = 4 * LAYER + 2 * TABLE + 4
    assert weights == SHAPE.parameters
    assert stage_resting(LEARNER) == {"parameters": 2 * weights, "gradients": 0, "optimizer": 12 * weights}
    kept = attrs.evolve(LEARNER, keeps_gradients=True)
    assert stage_resting(kept)["gradients"] == 4 * weights
    summed = attrs.evolve(kept, megatron=MegatronSharding(gradient_size=2))
    assert stage_resting(summed)["gradients"] == 2 * weights
    floats = attrs.evolve(LEARNER, computing=Computing(precision="float32"))
    assert stage_resting(floats) == {"parameters": 4 * weights, "gradients": 0, "optimizer": 8 * weights}


def test_a_stage_has_its_layers_and_one_table_and_replicas_share_the_optimizer() -> None:
    spread = attrs.evolve(LEARNER, megatron=MegatronSharding(stages=2, sharing_states=3))
    weights = 2 * LAYER + TABLE
    assert stage_resting(spread) == {"parameters": 2 * weights, "gradients": 0, "optimizer": 12 * weights // 3}
    cut = attrs.evolve(spread, computing=attrs.evolve(SIXTEEN, tensor=2))
    assert stage_resting(cut)["parameters"] == weights


def test_ranks_with_the_same_experts_share_their_optimizer_and_each_has_as_much_of_it() -> None:
    mixture = attrs.evolve(SHAPE, experts=6, experts_per_token=1)
    dense, experts = mixture.parameters - 4 * mixture.layer_experts, 4 * mixture.layer_experts
    for spread, same in ((1, 6), (2, 3), (6, 1)):
        megatron = MegatronSharding(sharing_states=6, sharing_expert_states=same)
        learner = attrs.evolve(LEARNER, shape=mixture, expert_parallel=spread, megatron=megatron)
        memory = stage_resting(learner)
        assert memory["parameters"] == 2 * (dense + experts // spread)
        assert memory["optimizer"] == 12 * dense // 6 + 12 * experts // 6


def test_the_first_stage_holds_a_micro_batch_for_each_stage() -> None:
    def activations(stages: int, micro_batches: int) -> int:
        deep = attrs.evolve(LEARNER, shape=attrs.evolve(SHAPE, layers=16), recomputes=True)
        learner = attrs.evolve(deep, megatron=MegatronSharding(stages=stages), micro_batches=micro_batches)
        return stage_memory(learner)["update"]["activations"]

    stream = stream_bytes(SHAPE, PASS, SIXTEEN)
    assert activations(4, 3) - activations(4, 2) == 4 * stream, "four layers on each stage"
    assert activations(4, 9) == activations(4, 4)


def test_tokens_that_are_cut_between_matrices_divide_all_that_a_layer_keeps() -> None:
    def activations(**spread: bool) -> int:
        computing = attrs.evolve(SIXTEEN, tensor=2)
        learner = attrs.evolve(
            LEARNER, computing=computing, megatron=MegatronSharding(stages=4, **spread), micro_batches=8
        )
        return stage_memory(learner)["update"]["activations"]

    assert activations(cuts_tokens=True) < activations()
    halves = attrs.evolve(PASS, sharing=2)
    assert 2 * layer_bytes(SHAPE, halves, SIXTEEN) == layer_bytes(SHAPE, PASS, SIXTEEN)


def test_a_reference_has_neither_gradients_nor_an_optimizer() -> None:
    reference = attrs.evolve(LEARNER, update=None, keeps_gradients=True)
    assert list(stage_memory(reference)) == ["scoring"]
    assert stage_resting(reference) == {"parameters": 2 * SHAPE.parameters, "gradients": 0, "optimizer": 0}


def test_an_adapter_alone_learns_beside_weights_that_rest() -> None:
    adapted = attrs.evolve(LEARNER, adapter_rank=2, megatron=MegatronSharding(stages=2))
    numbers = SHAPE.adapter_parameters(2) // 2
    assert stage_resting(adapted) == {
        "parameters": 2 * (2 * LAYER + TABLE + numbers),
        "gradients": 0,
        "optimizer": 12 * numbers,
    }
