"""One contract for every way of spreading a learner: same seed and data, same losses, gradients, weights and scores."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl.config import MixedPrecisionConfig, SkyRLLoraConfig, TrainerConfig
from skyrl.errors import ModelError
from skyrl.learners.workers.group import ScorerGroup
from skyrl.learners.workers.objectives import ReturnRegression
from skyrl.learners.workers.roles import RefWorker
from skyrl.planning.replicas import replicas
from skyrl.training.objective import policy_objective
from skyrl.tree import evolve_at
from tests.inference.nano import VOCABULARY, nano_model
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.learners.spreading import (
    CUT,
    CUT_BY_DEEPSPEED,
    CUTTING,
    DEEPSPEED,
    FSDP,
    STEPS,
    VARIANTS,
    WAYS,
    ZERO,
    Spread,
    Trained,
    assert_same_numbers,
    assert_same_weights,
    changed,
    copies,
    course,
    mini_batch,
    sharing_rows,
    stored,
    weights_of,
)
from tests.learners.updating import CriticWorker, LearnerGroup, PolicyWorker, imitate
from tests.long_cases import long_except

pytestmark = pytest.mark.xdist_group("ranks")


ONE_OF_EACH_KIND = (
    "FSDP2, 2x2 ranks cut matrices",
    "FSDP2, 4 ranks share sequences and 2 key heads",
    "FSDP2 hybrid 2x2",
    "FSDP2 on 2 ranks",
    "ZeRO-2, 2 ranks cut matrices",
    "ZeRO-3 on 2 ranks",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", long_except([*WAYS, *VARIANTS], *ONE_OF_EACH_KIND))
async def test_five_steps_are_those_of_one_process(name: str, spread: Spread, baseline: Trained) -> None:
    other = await course(spread.policy(*(WAYS | VARIANTS)[name]))
    for one, two in zip(baseline.metrics, other.metrics, strict=True):
        assert_same_numbers(one, two)
    assert_same_weights(baseline.weights, other.weights)
    torch.testing.assert_close(other.scores, baseline.scores, atol=2e-5, rtol=1e-5)


STEADY = {"policy.optimizer_config.adam_eps": 1e-6}
"""By AdamW's usual 1e-8, a gradient that is rounding alone would be a whole step."""


@pytest.fixture(scope="module")
def imitated(spread: Spread) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of one process, each of one pass over eight rows."""
    learner = spread.policy(STEADY, 1)
    losses = asyncio.run(imitate(learner, 1, [mini_batch(step) for step in range(3)]))
    return losses, asyncio.run(weights_of(learner))


@pytest.mark.parametrize(
    "name",
    long_except(
        [*WAYS, *VARIANTS],
        "one process, a row at a time",
        "ZeRO-2, offloaded optimizer",
    ),
)
async def test_two_passes_before_a_step_are_one_pass_of_both_batches(
    name: str, spread: Spread, imitated: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, weights = imitated
    changes, ranks = (WAYS | VARIANTS)[name]
    learner = spread.policy(changes | STEADY, ranks)
    assert await imitate(learner, 2, [mini_batch(step) for step in range(3)]) == pytest.approx(losses, rel=1e-4)
    assert_same_weights(weights, await weights_of(learner))


def test_the_losses_of_the_five_steps_differ_so_that_their_equality_says_something(baseline: Trained) -> None:
    losses = [metrics["final_loss"] for metrics in baseline.metrics]
    assert min(abs(one - two) for one in losses for two in losses if one is not two) > 1e-3


@pytest.mark.parametrize("name", long_except(["FSDP2 on 4 ranks", "ZeRO-3 on 2 ranks"], "FSDP2 on 4 ranks"))
async def test_a_model_that_has_not_learned_scores_as_it_was_loaded(name: str, spread: Spread) -> None:
    one, other = spread.policy({}, 1), spread.policy(*WAYS[name])
    rows = batch(4)
    torch.testing.assert_close(await other.score(rows), await one.score(rows), atol=1e-6, rtol=1e-6)
    assert_same_weights(await weights_of(one), await weights_of(other))


MIXTURES = ("qwen3_moe", "mixtral")
OTHER_KINDS = [
    (kind, name)
    for kind in ("qwen2", "qwen3", "llama", *MIXTURES)
    for name in ("FSDP2 on 2 ranks", CUT, "ZeRO-3 on 2 ranks", CUT_BY_DEEPSPEED)
    if not (kind in MIXTURES and name in (CUT, CUT_BY_DEEPSPEED))  # see the next test
]


@pytest.mark.parametrize("case", long_except(OTHER_KINDS, ("qwen3", CUT_BY_DEEPSPEED)))
async def test_models_of_other_kinds_start_and_learn_alike(
    case: tuple[str, str], spread: Spread, tmp_path: Path
) -> None:
    kind, name = case
    nano_model(kind).save_pretrained(tmp_path)
    path = {
        "policy.model.path": str(tmp_path),
        # Clipping takes a gradient norm of 350 down to 1: by AdamW's usual 1e-8 a gradient that is rounding alone would
        # be a whole step.
        "policy.optimizer_config.adam_eps": 1e-6,
    }
    changes, ranks = WAYS[name]
    one, other = spread.policy(path, 1), spread.policy(changes | path, ranks)
    for step in range(2):
        assert_same_numbers(await one.update(mini_batch(step)), await other.update(mini_batch(step)))
    assert_same_weights(await weights_of(one), await weights_of(other))


TABLES = [
    (name, tokens, tied)
    for name in (CUT, CUT_BY_DEEPSPEED, "ZeRO-0, 2 ranks cut matrices", "ZeRO-3, 2 ranks cut matrices")
    for tokens in (VOCABULARY, VOCABULARY + 1)
    for tied in (True, False)
]


@pytest.mark.long
@pytest.mark.parametrize("case", long_except(TABLES, (CUT_BY_DEEPSPEED, VOCABULARY, True)))
async def test_ranks_cut_tables_of_any_number_of_tokens(
    case: tuple[str, int, bool], spread: Spread, tmp_path: Path
) -> None:
    name, tokens, tied = case
    nano_model(vocab_size=tokens, tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    path = {"policy.model.path": str(tmp_path / "model"), "policy.optimizer_config.adam_eps": 1e-6}  # see above
    changes, ranks = WAYS[name]
    one, other = spread.policy(path, 1), spread.policy(changes | path, ranks)
    for step in range(2):
        assert_same_numbers(await one.update(mini_batch(step)), await other.update(mini_batch(step)))
    assert_same_weights(await weights_of(one), await weights_of(other))
    tensors, numbers = await stored(other, tmp_path)
    await other.update(mini_batch(9))
    for learner in (one, other):
        await learner.load_state(tensors, numbers)
    assert_same_numbers(await one.update(mini_batch(2)), await other.update(mini_batch(2)))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.long
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("strategy", [CUT, CUT_BY_DEEPSPEED])
def test_matrices_of_a_mixture_of_experts_are_not_cut(kind: str, strategy: str, spread: Spread, tmp_path: Path) -> None:
    nano_model(kind).save_pretrained(tmp_path)
    changes, ranks = WAYS[strategy]
    with pytest.raises(ModelError, match="tensor_parallel_size"):
        spread.policy(changes | {"policy.model.path": str(tmp_path)}, ranks)


@pytest.mark.parametrize(
    "name", long_except(["FSDP2 on 2 ranks", "ZeRO-2 on 2 ranks", "ZeRO-3 on 2 ranks"], "FSDP2 on 2 ranks")
)
async def test_rows_that_do_not_divide_and_ranks_without_a_token_change_nothing(name: str, spread: Spread) -> None:
    one, other = spread.policy({}, 1), spread.policy(*WAYS[name])
    uneven = mini_batch(0, rows=7)
    lopsided = uneven.with_fields(loss_mask=uneven.loss_mask & (torch.arange(7) < 4).unsqueeze(1))
    for rows in (uneven, lopsided):
        assert_same_numbers(await one.update(rows), await other.update(rows))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.parametrize("name", long_except(WAYS, "FSDP2 on 2 ranks"))
@pytest.mark.parametrize("rows", long_except([3, 7], 7))
async def test_rows_that_are_only_measured_count_alike_on_any_number_of_ranks(
    rows: int, name: str, spread: Spread
) -> None:
    without = {"algorithm.use_kl_loss": False}
    changes, ranks = WAYS[name]
    one, other = spread.policy(without, 1), spread.policy(changes | without, ranks)
    batch = mini_batch(0, rows=rows)
    assert batch.advantages is not None
    some = batch.with_fields(advantages=batch.advantages * (torch.arange(rows) < 2).unsqueeze(1))
    for _ in range(2):
        assert_same_numbers(await one.update(some), await other.update(some))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.parametrize(
    "name",
    long_except(["FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks", "ZeRO-2, 2 ranks cut matrices"], "FSDP2 on 2 ranks"),
)
async def test_weights_that_are_drawn_are_alike_however_a_model_is_spread(name: str, spread: Spread) -> None:
    changes, ranks = WAYS[name]
    drawn = {"policy.model.init_from_scratch": True}
    one, other = spread.policy(drawn, 1), spread.policy(changes | drawn, ranks)
    weights = await weights_of(other)
    assert all(torch.equal(weight, weights[name]) for name, weight in (await weights_of(one)).items())


ROUNDED = {**DEEPSPEED, "compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "changes",
    [
        {FSDP + "mixed_precision": MixedPrecisionConfig(param_dtype="bf16", reduce_dtype="fp32")},
        pytest.param(ROUNDED, marks=pytest.mark.long),
        pytest.param({**ROUNDED, ZERO + "stage": 0}, marks=pytest.mark.long),
        *(pytest.param({**ROUNDED, ZERO + "stage": stage, CUTTING: 2}, marks=pytest.mark.long) for stage in range(4)),
    ],
)
async def test_computing_in_bfloat16_stays_near_float32(
    changes: dict[str, Any], spread: Spread, baseline: Trained
) -> None:
    other = await course(spread.policy(changes, 2))
    # Of the second step: importance ratios of the first magnify rounding, to a sixth of the norm in one process, too.
    assert other.metrics[1]["grad_norm"] == pytest.approx(baseline.metrics[1]["grad_norm"], rel=0.05)
    assert other.metrics[1]["grad_norm"] != pytest.approx(baseline.metrics[1]["grad_norm"], rel=1e-5)
    assert {weight.dtype for weight in other.weights.values()} == {torch.float32}


@pytest.mark.long
async def test_one_rank_computes_in_bfloat16_as_two_do(spread: Spread) -> None:
    rounded = MixedPrecisionConfig(param_dtype="bf16", reduce_dtype="fp32", buffer_dtype="fp32")
    one = await course(spread.policy({"compute_dtype": "bfloat16"}, 1))
    two = await course(spread.policy({FSDP + "mixed_precision": rounded}, 2))
    for expected, metrics in zip(one.metrics, two.metrics, strict=True):
        assert expected["policy_loss"] == pytest.approx(metrics["policy_loss"], abs=2e-3)
        assert expected["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"strategy": "fsdp2"}, marks=pytest.mark.long),
        pytest.param(DEEPSPEED, marks=pytest.mark.long),
        {**DEEPSPEED, "ref.tensor_parallel_size": 2},
        pytest.param(
            {**DEEPSPEED, "ref.tensor_parallel_size": 2, "ref.deepspeed_config.zero_optimization.stage": 2},
            marks=pytest.mark.long,
        ),
    ],
)
async def test_the_reference_scores_alike_on_any_number_of_ranks(
    changes: dict[str, Any], spread: Spread, small: TrainerConfig
) -> None:
    one = RefWorker(small)
    trainer = changed(small, changes)
    together = replicas(2, inner=trainer.ref.tensor_parallel_size)
    group = spread.start(partial(RefWorker, trainer), 2, trainer.strategy, together)
    many = ScorerGroup[RefWorker](group, replicas=together)
    torch.testing.assert_close(await many.score(batch(7)), await one.score(batch(7)), atol=1e-5, rtol=1e-5)


ZERO_OF_CRITIC = "critic.deepspeed_config.zero_optimization."


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 1),
        pytest.param({}, 2, marks=pytest.mark.long),
        ({**DEEPSPEED, ZERO_OF_CRITIC + "stage": 2}, 2),
        *(
            pytest.param(changes, 2, marks=pytest.mark.long)
            for changes in (
                {"critic.tensor_parallel_size": 2},
                DEEPSPEED,
                {**DEEPSPEED, ZERO_OF_CRITIC + "stage": 2, "critic.tensor_parallel_size": 2},
            )
        ),
    ],
)
async def test_a_critic_learns_returns_alike_on_any_number_of_ranks(
    changes: dict[str, Any], ranks: int, spread: Spread, small: TrainerConfig
) -> None:
    objective = ReturnRegression(value_clip=None)
    rows = batch(8)
    rows = rows.with_fields(returns=torch.where(rows.loss_mask, 1.0, 0.0))
    one = CriticWorker(small, objective)
    trainer = changed(small, changes)
    together = replicas(ranks, inner=sharing_rows(trainer.critic))
    group = spread.start(partial(CriticWorker, trainer, objective), ranks, trainer.strategy, together)
    critic = LearnerGroup[CriticWorker](group, objective, replicas=together)
    losses = []
    for _ in range(STEPS):
        metrics = await critic.update(rows)
        assert_same_numbers(await one.update(rows), metrics)
        losses.append(metrics["critic_loss"])
    assert losses[0] == pytest.approx(0.5, abs=0.1), "new values are near 0 and the returns are 1"
    assert losses[-1] < losses[0] / 2
    torch.testing.assert_close(await critic.score(rows), await one.score(rows), atol=1e-4, rtol=1e-4)
    names = [name for name, _ in await critic.shapes()]
    assert names[-1] == "value_head.weight" and "lm_head.weight" not in names


def test_a_wrap_policy_that_names_no_module_is_refused(pool: Pool, small: TrainerConfig) -> None:
    wrong = evolve_at(small, FSDP + "wrap_policy", {"transformer_layer_cls_to_wrap": ["LlamaLayer"]})
    with pytest.raises(ModelError, match="names LlamaLayer, but the model has no such module"):
        pool.start(partial(PolicyWorker, wrong, policy_objective(wrong.algorithm)), 2)


ADAPTER = {
    "policy.model.lora": SkyRLLoraConfig(rank=4, alpha=8),
    "policy.optimizer_config.adam_eps": 1e-6,  # by AdamW's usual 1e-8 a gradient that is rounding alone is a whole step
}


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2 on 2 ranks",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                "FSDP2 hybrid 2x2",
                "FSDP2, 2 ranks cut matrices",
                "FSDP2, 2x2 ranks cut matrices",
                "FSDP2, 2 ranks share sequences",
                "ZeRO-0 on 2 ranks",
                "ZeRO-2 on 2 ranks",
                "ZeRO-3 on 2 ranks",
                "ZeRO-0, 2 ranks cut matrices",
                "ZeRO-2, 2 ranks cut matrices",
                "ZeRO-3, 2 ranks cut matrices",
            )
        ),
    ],
)
async def test_an_adapter_learns_alike_however_its_model_is_spread(name: str, spread: Spread) -> None:
    changes, ranks = WAYS[name]
    one, other = spread.policy(ADAPTER, 1), spread.policy(changes | ADAPTER, ranks)
    before = await weights_of(one)
    for step in range(3):
        assert_same_numbers(await one.update(mini_batch(step)), await other.update(mini_batch(step)))
    merged = await weights_of(one)
    assert_same_weights(merged, await weights_of(other))
    assert [name for name, _ in await other.shapes()] == list(merged)
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(merged["model.norm.weight"], before["model.norm.weight"])
    assert_same_weights(
        await one.export_weights(copies, adapter=True), await other.export_weights(copies, adapter=True)
    )
