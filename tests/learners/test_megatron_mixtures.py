"""Mixtures of experts under Megatron-core, on CPUs through the shim of `tests/megatron_shim.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.batch import TrainingBatch
from skyrl.config import TrainerConfig
from skyrl.errors import ModelError
from tests.inference.nano import nano_model
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.learners.spreading import (
    Trained,
    assert_same_numbers,
    assert_same_weights,
    changed,
    mini_batch,
    stored,
    weights_of,
)
from tests.learners.test_megatron import ADAPTER, APART, CONTEXT, KWARGS, PIPELINE, ROW_BY_ROW, TABLE, TENSOR, Spread
from tests.learners.test_mixtures import ROUTED, STEADY, routed, routed_course
from tests.long_cases import long_except

pytestmark = pytest.mark.xdist_group("ranks")

EXPERT, EXPERT_TENSOR = TABLE + "expert_model_parallel_size", TABLE + "expert_tensor_parallel_size"
DISPATCHER = TABLE + "moe_token_dispatcher_type"
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": ({}, 1),
    "2 replicas": ({}, 2),
    "EP2": ({EXPERT: 2}, 2),
    "EP2, padded": ({EXPERT: 2, "use_sample_packing": False}, 2),
    "EP2, a product for each expert": ({EXPERT: 2, TABLE + "moe_grouped_gemm": False}, 2),
    "EP2, allgather": ({EXPERT: 2, DISPATCHER: "allgather"}, 2),
    "EP2, nothing recomputed": ({EXPERT: 2, KWARGS: {"recompute_granularity": None}}, 2),
    "PP2 x EP2, experts recomputed": (
        {
            PIPELINE: 2,
            EXPERT: 2,
            KWARGS: {
                "recompute_granularity": "selective",
                "recompute_modules": ["moe"],
                "recompute_method": None,
                "recompute_num_layers": None,
            },
            **ROW_BY_ROW,
        },
        4,
    ),
    "EP2 x DP2": ({EXPERT: 2}, 4),
    "EP4": ({EXPERT: 4}, 4),
    "TP2": ({TENSOR: 2}, 2),
    "TP2, padded": ({TENSOR: 2, "use_sample_packing": False}, 2),
    "TP2, whole experts": ({TENSOR: 2, EXPERT_TENSOR: 1}, 2),
    "TP2 and EP2 on the same ranks": ({TENSOR: 2, EXPERT: 2, EXPERT_TENSOR: 1}, 2),
    "TP2 x EP2": ({TENSOR: 2, EXPERT: 2}, 4),
    "TP2 x EP2, allgather": ({TENSOR: 2, EXPERT: 2, DISPATCHER: "allgather"}, 4),
    "CP2 x EP2": ({CONTEXT: 2, EXPERT: 2}, 2),
    "PP2 x EP2": ({PIPELINE: 2, EXPERT: 2, **ROW_BY_ROW}, 4),
    "PP2 x EP2, allgather": ({PIPELINE: 2, EXPERT: 2, DISPATCHER: "allgather", **ROW_BY_ROW}, 4),
    "EP2, overlapping": (
        {
            EXPERT: 2,
            **{TABLE + f"ddp_config.overlap_{name}": True for name in ("grad_reduce", "param_gather")},
            **ROW_BY_ROW,
        },
        4,
    ),
    "EP2, divided before the sum": ({EXPERT: 2, TABLE + "ddp_config.average_in_collective": False}, 4),
}


def rows(step: int) -> TrainingBatch:
    """A mini-batch in which half of the rows name experts."""
    return routed(mini_batch(step))


@pytest.fixture(scope="module")
def mixture(processes: Pool, small: TrainerConfig, tmp_path_factory: pytest.TempPathFactory) -> Spread:
    """Learners of a model with 8 experts, 2 for a token; routers learn, and replay half of the rows."""
    folder = tmp_path_factory.mktemp("mixture")
    nano_model("qwen3_moe").save_pretrained(folder)
    return Spread(processes, changed(small, {"policy.model.path": str(folder), **STEADY, **ROUTED}))


@pytest.fixture(scope="module")
def baseline(mixture: Spread) -> Trained:
    return asyncio.run(routed_course(mixture.alone({})))


@pytest.mark.parametrize("name", long_except(WAYS, "EP2"))
async def test_five_steps_are_those_of_one_process(name: str, mixture: Spread, baseline: Trained) -> None:
    other = await routed_course(mixture.policy(*WAYS[name]))
    for one, two in zip(baseline.metrics, other.metrics, strict=True):
        assert_same_numbers(one, two)
    assert_same_weights(baseline.weights, other.weights)
    torch.testing.assert_close(other.scores, baseline.scores, atol=2e-5, rtol=1e-5)


VARIANTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "qwen3_moe": ({"norm_topk_prob": False}, 8, 2),
    "qwen3_moe, a dense layer": ({"mlp_only_layers": [0]}, 8, 1),
    "mixtral": ({}, 4, 2),
}
"""What is changed of a model, its experts, and its layers with experts."""


@pytest.mark.parametrize("name", long_except(["EP2", "TP2 x EP2", "PP2 x EP2"], "EP2"))
@pytest.mark.parametrize("kind", long_except(VARIANTS, "mixtral"))
async def test_mixtures_of_other_kinds_are_converted_both_ways_and_learn_alike(
    kind: str, name: str, mixture: Spread, tmp_path: Path
) -> None:
    values, *sizes = VARIANTS[kind]
    nano_model(kind.partition(",")[0], **values).save_pretrained(tmp_path)
    path = {"policy.model.path": str(tmp_path)}
    changes, ranks = WAYS[name]
    one, other = mixture.alone(path), mixture.policy(changes | path, ranks)
    plain = routed(batch(7), *sizes)
    torch.testing.assert_close(await other.score(plain), await one.score(plain), atol=1e-5, rtol=1e-5)
    before = await weights_of(other)
    assert all(torch.equal(weight, before[key]) for key, weight in (await weights_of(one)).items())
    for step in range(2):
        mini = routed(mini_batch(step), *sizes)
        assert_same_numbers(await one.update(mini), await other.update(mini))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("EP2", None),
        *(
            pytest.param(saved, loaded, marks=pytest.mark.long)
            for saved, loaded in ((None, "EP2"), ("PP2 x EP2", "TP2 and EP2 on the same ranks"), ("EP4", "TP2"))
        ),
    ],
)
async def test_a_state_goes_on_with_other_degrees_and_under_fsdp2(
    saved: str | None, loaded: str | None, mixture: Spread, baseline: Trained, tmp_path: Path
) -> None:
    first = mixture.fsdp2() if saved is None else mixture.policy(*WAYS[saved])
    for step in range(3):
        await first.update(rows(step))
    tensors, numbers = await stored(first, tmp_path)
    second = mixture.fsdp2() if loaded is None else mixture.policy(*WAYS[loaded])
    await second.load_state(tensors, numbers)
    for step in (3, 4):
        assert_same_numbers(baseline.metrics[step], await second.update(rows(step)))
    assert_same_weights(baseline.weights, await weights_of(second))


@pytest.mark.long
@pytest.mark.parametrize("name", ["EP2", "TP2 x EP2", "TP2 and EP2 on the same ranks"])
async def test_sgd_learns_alike(name: str, mixture: Spread) -> None:
    changes, ranks = WAYS[name]
    sgd = {"policy.optimizer_config.optimizer": "sgd", "policy.optimizer_config.lr": 0.01}
    one, other = mixture.alone(sgd), mixture.policy(changes | sgd, ranks)
    for step in range(2):
        assert_same_numbers(await one.update(rows(step)), await other.update(rows(step)))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.long
async def test_the_learning_rate_of_experts_follows_the_schedule(mixture: Spread) -> None:
    warm = {"policy.optimizer_config.num_warmup_steps": 2}
    changes, ranks = WAYS["EP2"]
    one, other = mixture.alone(warm), mixture.policy(changes | warm, ranks)
    for step in range(3):
        assert_same_numbers(await one.update(rows(step)), await other.update(rows(step)))
    assert_same_weights(await weights_of(one), await weights_of(other))


BIASED = {TABLE + "moe_router_score_function": "sigmoid", TABLE + "moe_router_enable_expert_bias": True}


@pytest.mark.long
async def test_biases_of_experts_move_are_stored_and_stay_where_a_step_is_left_out(
    mixture: Spread, tmp_path: Path
) -> None:
    changes, ranks = WAYS["EP2"]
    faster = {KWARGS: {"moe_router_bias_update_rate": 0.25}, "policy.optimizer_config.max_skipped_updates": 1}
    learner = mixture.policy(changes | BIASED | faster, ranks)
    weighed = learner.objective.weigh(rows(1))
    assert weighed.advantages is not None
    bad = evolve(rows(1), advantages=torch.full_like(weighed.advantages, torch.nan))
    assert (await learner.update(bad))["skipped_updates"] == 1
    tensors, _ = await stored(learner, tmp_path / "before")
    names = [f"router.decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(2)]
    assert all(not tensors.read(name).any() for name in names)
    await learner.update(rows(0))
    tensors, numbers = await stored(learner, tmp_path / "after")
    assert {abs(float(value)) for name in names for value in tensors.read(name)} <= {0.0, 0.25}
    assert all(tensors.read(name).any() for name in names)
    scores = await learner.score(routed(batch(7)))
    restored = mixture.policy(changes | BIASED | faster, ranks)
    await restored.load_state(tensors, numbers)
    assert torch.equal(await restored.score(routed(batch(7))), scores)
    without = mixture.policy(changes | {TABLE + "moe_router_score_function": "sigmoid"}, ranks)
    await without.load_state(tensors, numbers)
    assert not torch.allclose(await without.score(routed(batch(7))), scores, atol=1e-3)


@pytest.mark.parametrize("kind", long_except(["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"], "aux_loss"))
async def test_balancing_changes_what_the_router_learns(kind: str, mixture: Spread) -> None:
    weight: dict[str, Any] = {KWARGS: {"moe_aux_loss_coeff": 10.0}}
    if kind == "sinkhorn":  # which replays nothing
        weight = {"policy.moe_enable_routing_replay": False}
    balancing = {TABLE + "moe_router_load_balancing_type": kind, **weight}
    plain, balanced = mixture.alone({}), mixture.policy(WAYS["EP2"][0] | balancing, 2)
    if kind != "sinkhorn":  # whose weights are not those of the model
        torch.testing.assert_close(
            await balanced.score(routed(batch(7))), await plain.score(routed(batch(7))), atol=1e-5, rtol=1e-5
        )
    one, two = await plain.update(rows(0)), await balanced.update(rows(0))
    assert two["grad_norm"] != pytest.approx(one["grad_norm"], rel=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({EXPERT: 3}, 3, r"3 ranks cannot share the model's 8 experts: set .*expert_model_parallel_size = 1"),
        (
            {TENSOR: 2, EXPERT_TENSOR: 5},
            2,
            r"5 ranks cannot share the model's 24 features of an expert: set .*expert_tensor.*_size = 2",
        ),
        ({EXPERT: 2, DISPATCHER: "flex"}, 2, r"moe_token_dispatcher_type: .*DeepEP is not installed"),
        ({TENSOR: 2, KWARGS: {"sequence_parallel": False}}, 2, r"kwargs\.sequence_parallel: Megatron-core requires it"),
        ({KWARGS: {"moe_grouped_gemm": True}}, 1, r"kwargs\.moe_grouped_gemm follows from"),
    ],
)
def test_what_does_not_fit_the_model_or_megatron_core_is_refused_by_name(
    changes: dict[str, Any], ranks: int, message: str, mixture: Spread
) -> None:
    with pytest.raises(ModelError, match=message):
        mixture.policy(changes, ranks)


async def test_experts_of_another_number_of_layers_are_refused(mixture: Spread) -> None:
    learner = mixture.policy({}, 1)
    with pytest.raises(ModelError, match="in 3 layers, and the learner's model has 2"):
        await learner.score(routed(batch(7), layers=3))


def test_a_model_without_experts_has_none_to_spread(processes: Pool, small: TrainerConfig) -> None:
    with pytest.raises(ModelError, match=r"no experts that ranks could share: set .*expert_model_parallel_size = 1"):
        Spread(processes, small).policy({EXPERT: 2}, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["EP2", "TP2 and EP2 on the same ranks", "PP2 x EP2"])
async def test_adapters_learn_beside_experts_that_stay(name: str, mixture: Spread) -> None:
    changes, ranks = WAYS[name]
    one, other = mixture.alone(ADAPTER), mixture.policy(changes | APART, ranks)
    for step in range(2):
        assert_same_numbers(await one.update(rows(step)), await other.update(rows(step)))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.long
async def test_computing_in_bfloat16_stays_near_float32_and_keeps_weights_in_float32(
    mixture: Spread, baseline: Trained, tmp_path: Path
) -> None:
    changes, ranks = WAYS["EP2 x DP2"]
    learner = mixture.policy({**changes, "compute_dtype": "bfloat16"}, ranks)
    first = await learner.update(rows(0))
    assert first["policy_loss"] == pytest.approx(baseline.metrics[0]["policy_loss"], rel=0.3)
    tensors, numbers = await stored(learner, tmp_path)
    undisturbed = await learner.update(rows(1)), await weights_of(learner)
    await learner.load_state(tensors, numbers)
    resumed = await learner.update(rows(1)), await weights_of(learner)
    assert resumed[0] == undisturbed[0]
    assert all(torch.equal(weight, resumed[1][key]) for key, weight in undisturbed[1].items())
    assert {weight.dtype for weight in resumed[1].values()} == {torch.float32}
