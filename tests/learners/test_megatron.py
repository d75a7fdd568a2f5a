"""The learners' contract under Megatron-core, on CPUs through the shim of `tests/megatron_shim.py`."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.config import MegatronConfig, SkyRLLoraConfig, TrainerConfig
from skyrl.errors import ModelError, ResumeError
from skyrl.learners.ranks import Ranks
from skyrl.learners.workers.group import ScorerGroup
from skyrl.learners.workers.model_worker import token_budget
from skyrl.learners.workers.objectives import ReturnRegression
from skyrl.learners.workers.roles import RefWorker, TeacherWorker
from skyrl.planning.replicas import Replicas, replicas
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.training.objective import policy_objective
from tests.inference.nano import nano_model
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.learners.spreading import (
    Trained,
    assert_same_numbers,
    assert_same_weights,
    changed,
    copies,
    course,
    mini_batch,
    stored,
    weights_of,
)
from tests.learners.updating import CriticWorker, LearnerGroup, PolicyWorker, imitate
from tests.long_cases import long_except
from tests.megatron_shim import shimmed

pytestmark = pytest.mark.xdist_group("ranks")

TABLE = "policy.megatron_config."
TENSOR, PIPELINE, CONTEXT = (TABLE + f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
KWARGS = TABLE + "transformer_config_kwargs"
ROW_BY_ROW = {"micro_train_batch_size_per_gpu": 1, "micro_forward_batch_size_per_gpu": 2}

WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": ({}, 1),
    "one rank, padded": ({"use_sample_packing": False}, 1),
    "2 replicas": ({}, 2),
    "TP2": ({TENSOR: 2}, 2),
    "TP2 without sequence parallelism": ({TENSOR: 2, KWARGS: {"sequence_parallel": False}}, 2),
    "TP2, padded": ({TENSOR: 2, "use_sample_packing": False}, 2),
    "PP2": ({PIPELINE: 2, **ROW_BY_ROW}, 2),
    "CP2": ({CONTEXT: 2}, 2),
    "TP2 of 2 replicas": ({TENSOR: 2}, 4),
    "TP2 x PP2": ({TENSOR: 2, PIPELINE: 2, **ROW_BY_ROW}, 4),
    "PP2 of 2 replicas": ({PIPELINE: 2, **ROW_BY_ROW}, 4),
    "TP2 x CP2": ({TENSOR: 2, CONTEXT: 2}, 4),
    "CP2 x PP2": ({PIPELINE: 2, CONTEXT: 2, **ROW_BY_ROW}, 4),
}
DDP = TABLE + "ddp_config."
OVERLAPPING = {DDP + "overlap_grad_reduce": True, DDP + "overlap_param_gather": True, **ROW_BY_ROW}
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "2 replicas, overlapping": (OVERLAPPING, 2),
    "PP2 of 2 replicas, overlapping": ({PIPELINE: 2, **OVERLAPPING}, 4),
    "2 replicas, divided before the sum": ({DDP + "average_in_collective": False}, 2),
    "2 replicas, summed in the type of the weights": ({DDP + "grad_reduce_in_fp32": False}, 2),
    "TP2, nothing recomputed": ({TENSOR: 2, KWARGS: {"recompute_granularity": None}}, 2),
    "TP2, attention recomputed": (
        {
            TENSOR: 2,
            KWARGS: {
                "recompute_granularity": "selective",
                "recompute_method": None,
                "recompute_num_layers": None,
            },
        },
        2,
    ),
    "2 replicas under a budget": ({"max_tokens_per_microbatch": 25}, 2),
}


def without_the_whole_model(maker: Any, *, ranks: Ranks) -> Any:
    """`maker(ranks=...)`, which may read rows of the stored weights, and may not load the model."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a rank loads the whole model")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.learners.workers.roles.load_causal_lm", load)
        return maker(ranks=ranks)


class Spread:
    """Policies under Megatron, and one in this process that they are compared with."""

    def __init__(self, processes: Pool, small: TrainerConfig) -> None:
        self._processes, self._small = processes, small

    def policy(self, changes: dict[str, Any], ranks: int) -> LearnerGroup[PolicyWorker]:
        trainer = changed(self._small, {"strategy": "megatron"} | changes)
        objective = policy_objective(trainer.algorithm)
        together = self._together(trainer.policy.megatron_config, ranks)
        maker = partial(shimmed, partial(without_the_whole_model, partial(PolicyWorker, trainer, objective)))
        group = self._processes.start(maker, ranks, together)
        return LearnerGroup(group, objective, token_budget(trainer), replicas=together)

    def fsdp2(self, changes: dict[str, Any] | None = None) -> LearnerGroup[PolicyWorker]:
        trainer = changed(self._small, changes or {})
        objective = policy_objective(trainer.algorithm)
        group = self._processes.start(partial(PolicyWorker, trainer, objective), 2)
        return LearnerGroup(group, objective, token_budget(trainer), replicas=replicas(2))

    def critic(self, changes: dict[str, Any], ranks: int) -> LearnerGroup[CriticWorker]:
        trainer, objective = changed(self._small, {"strategy": "megatron"} | changes), ReturnRegression(value_clip=None)
        together = self._together(trainer.critic.megatron_config, ranks)
        maker = partial(shimmed, partial(without_the_whole_model, partial(CriticWorker, trainer, objective)))
        return LearnerGroup(self._processes.start(maker, ranks, together), objective, replicas=together)

    @staticmethod
    def _together(config: MegatronConfig, ranks: int) -> Replicas:
        inner = config.tensor_model_parallel_size * config.context_parallel_size
        return replicas(ranks, inner=inner, stages=config.pipeline_model_parallel_size)

    def alone(self, changes: dict[str, Any]) -> LearnerGroup[PolicyWorker]:
        trainer = changed(self._small, changes)
        objective = policy_objective(trainer.algorithm)
        group = Group([LocalHandle("rank-0", PolicyWorker(trainer, objective))])
        return LearnerGroup(group, objective, token_budget(trainer))


@pytest.fixture(scope="module")
def spread(processes: Pool, small: TrainerConfig) -> Spread:
    return Spread(processes, small)


@pytest.fixture(scope="module")
def baseline(spread: Spread) -> Trained:
    return asyncio.run(course(spread.alone({})))


@pytest.mark.parametrize("name", long_except(WAYS | VARIANTS, "TP2 x PP2", "CP2"))
async def test_five_steps_are_those_of_one_process(name: str, spread: Spread, baseline: Trained) -> None:
    other = await course(spread.policy(*(WAYS | VARIANTS)[name]))
    for one, two in zip(baseline.metrics, other.metrics, strict=True):
        assert_same_numbers(one, two)
    assert_same_weights(baseline.weights, other.weights)
    torch.testing.assert_close(other.scores, baseline.scores, atol=2e-5, rtol=1e-5)


PADDING = 258
"""The padding token of the small model."""

STEADY = {"policy.optimizer_config.adam_eps": 1e-6}
"""By AdamW's usual 1e-8, a gradient that is rounding alone would be a whole step."""


@pytest.fixture(scope="module")
def imitated(spread: Spread) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of one process, each of one pass over eight rows."""
    learner = spread.alone(STEADY)
    losses = asyncio.run(imitate(learner, 1, [mini_batch(step) for step in range(3)]))
    return losses, asyncio.run(weights_of(learner))


@pytest.mark.parametrize("name", long_except([*WAYS, *VARIANTS], "2 replicas, overlapping"))
async def test_two_passes_before_a_step_are_one_pass_of_both_batches(
    name: str, spread: Spread, imitated: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, weights = imitated
    changes, ranks = (WAYS | VARIANTS)[name]
    learner = spread.policy(changes | STEADY, ranks)
    assert await imitate(learner, 2, [mini_batch(step) for step in range(3)]) == pytest.approx(losses, rel=1e-4)
    assert_same_weights(weights, await weights_of(learner))


@pytest.mark.long
@pytest.mark.parametrize("kind", long_except(["qwen2", "qwen3", "llama"], "qwen3"))
@pytest.mark.parametrize("name", long_except(["one rank", "TP2 x PP2", "2 replicas, overlapping"], "TP2 x PP2"))
async def test_models_of_other_kinds_are_converted_both_ways_and_learn_alike(
    kind: str, name: str, spread: Spread, tmp_path: Path
) -> None:
    nano_model(kind).save_pretrained(tmp_path)
    path = {"policy.model.path": str(tmp_path), "policy.optimizer_config.adam_eps": 1e-6}
    changes, ranks = (WAYS | VARIANTS)[name]
    one, other = spread.alone(path), spread.policy(changes | path, ranks)
    torch.testing.assert_close(await other.score(batch(7)), await one.score(batch(7)), atol=1e-5, rtol=1e-5)
    before = await weights_of(other)
    assert all(torch.equal(weight, before[key]) for key, weight in (await weights_of(one)).items())
    for step in range(2):
        assert_same_numbers(await one.update(mini_batch(step)), await other.update(mini_batch(step)))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("TP2 x PP2", None),
        *(
            pytest.param(saved, loaded, marks=pytest.mark.long)
            for saved, loaded in (
                (None, "TP2 x PP2"),
                ("2 replicas", "TP2"),
                ("PP2", "TP2 of 2 replicas"),
                ("CP2", None),
            )
        ),
    ],
)
async def test_a_state_goes_on_with_other_degrees_and_under_fsdp2(
    saved: str | None, loaded: str | None, spread: Spread, baseline: Trained, tmp_path: Path
) -> None:
    first = spread.fsdp2() if saved is None else spread.policy(*WAYS[saved])
    for step in range(3):
        await first.update(mini_batch(step))
    tensors, numbers = await stored(first, tmp_path)
    second = spread.fsdp2() if loaded is None else spread.policy(*WAYS[loaded])
    await second.update(mini_batch(9))  # what is there before is replaced
    await second.load_state(tensors, numbers)
    for step in (3, 4):
        assert_same_numbers(baseline.metrics[step], await second.update(mini_batch(step)))
    assert_same_weights(baseline.weights, await weights_of(second))


@pytest.mark.parametrize("name", long_except(["2 replicas", "TP2 x PP2"], "2 replicas"))
async def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(name: str, spread: Spread) -> None:
    changes, ranks = WAYS[name]
    learner = spread.policy({**changes, "policy.optimizer_config.max_skipped_updates": 1}, ranks)
    twin = spread.alone({})
    good, last = mini_batch(1), torch.arange(8) == 7
    assert good.advantages is not None
    bad = evolve(good, advantages=torch.where(last.unsqueeze(1), torch.nan, good.advantages))
    assert (await learner.update(bad))["skipped_updates"] == 1
    assert_same_weights(await weights_of(twin), await weights_of(learner))
    assert_same_numbers(await twin.update(good), await learner.update(good))


@pytest.mark.parametrize("name", long_except(["2 replicas", "TP2 x PP2"], "2 replicas"))
async def test_sgd_learns_alike(name: str, spread: Spread) -> None:
    changes, ranks = WAYS[name]
    sgd = {"policy.optimizer_config.optimizer": "sgd", "policy.optimizer_config.lr": 0.1}
    one, other = spread.alone(sgd), spread.policy(changes | sgd, ranks)
    for step in range(2):
        rows = mini_batch(step)
        rows.input_ids[:, 1] = PADDING  # whose embedding does not learn
        assert_same_numbers(await one.update(rows), await other.update(rows))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({TENSOR: 4}, 4, r"4 ranks cannot share the model's 2 key and value heads: set .*tensor_model.*_size = 2"),
        (
            {PIPELINE: 4},
            4,
            r"4 ranks cannot share the model's 2 layers: set .*pipeline_model.*_size = 2",
        ),
        ({KWARGS: {"hidden_size": 3}}, 1, r"transformer_config_kwargs\.hidden_size follows from the model"),
        ({KWARGS: {"hiden_size": 3}}, 1, r"transformer_config_kwargs\.hiden_size: .* has no such field"),
        ({TABLE + "optimizer_config_kwargs": {"speed": 3}}, 1, r"optimizer_config_kwargs: .*'speed'"),
    ],
)
def test_what_does_not_fit_the_model_or_megatron_core_is_refused_by_name(
    changes: dict[str, Any], ranks: int, message: str, spread: Spread
) -> None:
    with pytest.raises(ModelError, match=message):
        spread.policy(changes, ranks)


@pytest.mark.parametrize(("role", "worker"), [("ref", RefWorker), ("teacher", TeacherWorker)])
async def test_a_model_that_does_not_learn_scores_alike(
    role: str, worker: type[RefWorker | TeacherWorker], spread: Spread, small: TrainerConfig, processes: Pool
) -> None:
    small = changed(small, {f"{role}.model.path": small.policy.model.path})
    trainer = changed(
        small, {"strategy": "megatron", **{path.replace("policy", role): 2 for path in (TENSOR, PIPELINE)}}
    )
    together = replicas(4, inner=2, stages=2)
    group = processes.start(partial(shimmed, partial(worker, trainer)), 4, together)
    many = ScorerGroup[Any](group, replicas=together)
    torch.testing.assert_close(await many.score(batch(7)), await worker(small).score(batch(7)), atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", long_except(["2 replicas", "TP2 x PP2"], "2 replicas"))
async def test_computing_in_bfloat16_stays_near_float32_and_keeps_weights_in_float32(
    name: str, spread: Spread, baseline: Trained, tmp_path: Path
) -> None:
    changes, ranks = WAYS[name]
    learner = spread.policy({**changes, "compute_dtype": "bfloat16"}, ranks)
    before = await weights_of(learner)
    first = await learner.update(mini_batch(0))
    assert first["grad_norm"] == pytest.approx(baseline.metrics[0]["grad_norm"], rel=0.05)
    assert first["grad_norm"] != pytest.approx(baseline.metrics[0]["grad_norm"], rel=1e-5)
    tensors, numbers = await stored(learner, tmp_path)
    undisturbed = await learner.update(mini_batch(1)), await weights_of(learner)
    await learner.load_state(tensors, numbers)
    resumed = await learner.update(mini_batch(1)), await weights_of(learner)
    assert resumed[0] == undisturbed[0]
    assert all(torch.equal(weight, resumed[1][key]) for key, weight in undisturbed[1].items())
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    moved = resumed[1]["model.norm.weight"] - before["model.norm.weight"]
    assert (moved.abs() < 0.004).any(), "less than bfloat16 can tell from 1"


LORA_TYPE = TABLE + "lora_config.lora_type"
LORA = "policy.model.lora"
ADAPTER = {
    LORA: SkyRLLoraConfig(rank=4, alpha=8),
    "policy.optimizer_config.adam_eps": 1e-6,  # by AdamW's usual 1e-8 a gradient that is rounding alone is a whole step
}
APART = {**ADAPTER, LORA_TYPE: "canonical_lora"}
"""Joined layers have a factor A each, as they have under the other strategies."""


@pytest.mark.long
@pytest.mark.parametrize("name", long_except(WAYS | VARIANTS, "TP2 x PP2"))
async def test_an_adapter_learns_as_in_one_process(name: str, spread: Spread) -> None:
    changes, ranks = (WAYS | VARIANTS)[name]
    one, other = spread.alone(ADAPTER), spread.policy(changes | APART, ranks)
    before = await weights_of(other)
    assert_same_weights(await weights_of(one), before)
    for step in range(3):
        assert_same_numbers(await one.update(mini_batch(step)), await other.update(mini_batch(step)))
    merged = await weights_of(one)
    assert_same_weights(merged, await weights_of(other))
    assert [name for name, _ in await other.shapes()] == list(merged)
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert_same_weights(
        await one.export_weights(copies, adapter=True), await other.export_weights(copies, adapter=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", long_except(WAYS, "TP2"))
async def test_adapters_with_a_factor_in_common_learn_alike_on_any_ranks(name: str, spread: Spread) -> None:
    changes, ranks = WAYS[name]
    courses = []
    for strategy, size in (({}, 1), (changes, ranks)):
        learner = spread.policy(strategy | ADAPTER, size)
        numbers = [await learner.update(mini_batch(step)) for step in range(3)]
        courses.append((numbers, await learner.export_weights(copies, adapter=True)))
    (one, adapter), (other, same) = courses
    for expected, metrics in zip(one, other, strict=True):
        assert_same_numbers(expected, metrics)
    assert_same_weights(adapter, same)
    query, key, value = (f"base_model.model.model.layers.1.self_attn.{letter}_proj.lora_A.weight" for letter in "qkv")
    assert torch.equal(same[query], same[key]) and torch.equal(same[query], same[value])
    assert not torch.equal(same[key.replace("_A", "_B")], same[value.replace("_A", "_B")])


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "loaded"), [pytest.param("TP2 x PP2", None, marks=pytest.mark.long), (None, "TP2 x PP2")]
)
async def test_adapters_go_on_with_other_degrees_and_under_fsdp2(
    saved: str | None, loaded: str | None, spread: Spread, tmp_path: Path
) -> None:
    def started(name: str | None) -> LearnerGroup[PolicyWorker]:
        return spread.fsdp2(ADAPTER) if name is None else spread.policy(WAYS[name][0] | APART, WAYS[name][1])

    one, first = spread.alone(ADAPTER), started(saved)
    expected = [await one.update(mini_batch(step)) for step in range(4)]
    for step in range(2):
        await first.update(mini_batch(step))
    tensors, numbers = await stored(first, tmp_path)
    second = started(loaded)
    await second.update(mini_batch(9))  # what is there before is replaced
    await second.load_state(tensors, numbers)
    for step in (2, 3):
        assert_same_numbers(expected[step], await second.update(mini_batch(step)))
    assert_same_weights(
        await one.export_weights(copies, adapter=True), await second.export_weights(copies, adapter=True)
    )


@pytest.mark.long
async def test_adapters_that_were_not_learned_as_one_are_refused_where_they_are_to_be(
    spread: Spread, tmp_path: Path
) -> None:
    tensors, numbers = await stored(spread.policy(APART, 1), tmp_path)
    common = spread.policy(ADAPTER, 1)
    with pytest.raises(ResumeError, match=r"q_proj and .*k_proj have separate factors A.* = canonical_lora"):
        await common.load_state(tensors, numbers)


def test_a_pipeline_stage_without_an_adapter_is_refused(spread: Spread) -> None:
    first_layer = {LORA: SkyRLLoraConfig(rank=4, target_modules=r".*layers\.0.*q_proj")}
    with pytest.raises(ModelError, match=r"a pipeline stage has no adapter: .* set .*pipeline_model_parallel_size = 1"):
        spread.policy({PIPELINE: 2, **first_layer}, 2)


CRITICS = ("one rank", "2 replicas", "TP2", "PP2", "CP2", "TP2 x PP2", "PP2 of 2 replicas")


@pytest.mark.long
@pytest.mark.parametrize("name", long_except([*CRITICS, "PP2, adapted"], "PP2, adapted"))
async def test_a_critic_learns_returns_as_in_one_process(
    name: str, spread: Spread, small: TrainerConfig, tmp_path: Path
) -> None:
    changes, ranks = WAYS[name.partition(",")[0]]
    adapter = {path.replace("policy", "critic"): value for path, value in (APART if "adapted" in name else {}).items()}
    rows = batch(8)
    rows = rows.with_fields(returns=torch.where(rows.loss_mask, 1.0, 0.0))
    one = CriticWorker(changed(small, adapter), ReturnRegression(value_clip=None))
    critics = {path.replace("policy", "critic"): value for path, value in changes.items()}
    critic = spread.critic(critics | adapter, ranks)
    losses = []
    for _ in range(5):
        metrics = await critic.update(rows)
        assert_same_numbers(await one.update(rows), metrics)
        losses.append(metrics["critic_loss"])
    assert losses[0] == pytest.approx(0.5, abs=0.1), "new values are near 0 and the returns are 1"
    assert losses[-1] < losses[0] / 2
    scores = await one.score(rows)
    torch.testing.assert_close(await critic.score(rows), scores, atol=1e-4, rtol=1e-4)
    names = [key for key, _ in await critic.shapes()]
    assert names[-1] == "value_head.weight" and "lm_head.weight" not in names
    tensors, numbers = await stored(critic, tmp_path)
    restored = CriticWorker(changed(small, adapter), ReturnRegression(value_clip=None))
    restored.load_state(tensors, numbers)
    torch.testing.assert_close(await restored.score(rows), scores, atol=1e-4, rtol=1e-4)
