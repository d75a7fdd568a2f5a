"""One contract for every way of spreading a learner: same seed and data, same losses, gradients, weights and scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.checkpoint.shards import StoredTensors, TensorShard, write_shards
from skyrl.config import CriticConfig, MixedPrecisionConfig, PolicyConfig, SkyRLLoraConfig, TrainerConfig
from skyrl.errors import ModelError, NonFiniteError, ResumeError
from skyrl.learners.fsdp2 import ahead
from skyrl.learners.group import LearnerGroup, ScorerGroup
from skyrl.learners.model_worker import token_budget
from skyrl.learners.regression import ReturnRegression
from skyrl.learners.workers import CriticWorker, PolicyWorker, RefWorker
from skyrl.planning.replicas import Replicas, replicas
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.storage.disk import Disk
from skyrl.training.objective import policy_objective
from skyrl.tree import evolve_at
from tests.inference.nano import VOCABULARY, nano_model
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.long_cases import long_except

pytestmark = pytest.mark.xdist_group("ranks")

FSDP = "policy.fsdp_config."
ZERO = "policy.deepspeed_config.zero_optimization."
DEEPSPEED = {"strategy": "deepspeed"}
SHARING = "policy.sequence_parallel_size"
CONTEXT = "policy.context_parallel_size"
CUTTING = "policy.tensor_parallel_size"

WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "FSDP2 on 2 ranks": ({"strategy": "fsdp2"}, 2),
    "FSDP2 on 4 ranks": ({"strategy": "fsdp"}, 4),
    "FSDP2 hybrid 2x2": ({FSDP + "fsdp_size": 2}, 4),
    "ZeRO-2 on 2 ranks": ({**DEEPSPEED, ZERO + "stage": 2}, 2),
    "ZeRO-3 on 2 ranks": ({**DEEPSPEED, ZERO + "stage": 3}, 2),
    "ZeRO-0 on 2 ranks": ({**DEEPSPEED, ZERO + "stage": 0}, 2),
    "ZeRO-1 on 2 ranks": ({**DEEPSPEED, ZERO + "stage": 1}, 2),
    "FSDP2, 2 ranks share sequences": ({SHARING: 2}, 2),
    "FSDP2, 2x2 ranks share sequences": ({SHARING: 2}, 4),
    "FSDP2, 4 ranks share sequences and 2 key heads": ({SHARING: 4}, 4),
    "FSDP2, 2 ranks share keys": ({CONTEXT: 2}, 2),
    "FSDP2, 2x2 ranks share keys": ({CONTEXT: 2}, 4),
    "FSDP2, 4 ranks share keys": ({CONTEXT: 4}, 4),
    "FSDP2, 2 ranks share keys of 2 that share sequences": ({CONTEXT: 2, SHARING: 2}, 4),
    "FSDP2, 2 ranks share keys of 2 that cut matrices": ({CONTEXT: 2, CUTTING: 2}, 4),
    "ZeRO-0, 2 ranks cut matrices": ({**DEEPSPEED, ZERO + "stage": 0, CUTTING: 2}, 2),
    "ZeRO-1, 2 ranks cut matrices": ({**DEEPSPEED, ZERO + "stage": 1, CUTTING: 2}, 2),
    "ZeRO-2, 2 ranks cut matrices": ({**DEEPSPEED, ZERO + "stage": 2, CUTTING: 2}, 2),
    "ZeRO-3, 2 ranks cut matrices": ({**DEEPSPEED, ZERO + "stage": 3, CUTTING: 2}, 2),
    "ZeRO-2, 2x2 ranks cut matrices": ({**DEEPSPEED, ZERO + "stage": 2, CUTTING: 2}, 4),
    "ZeRO-3, 2x2 ranks cut matrices": ({**DEEPSPEED, ZERO + "stage": 3, CUTTING: 2}, 4),
    "ZeRO-2, 2 ranks share keys of 2 that cut matrices": ({**DEEPSPEED, ZERO + "stage": 2, CONTEXT: 2, CUTTING: 2}, 4),
    "FSDP2, 2 ranks cut matrices": ({CUTTING: 2}, 2),
    "FSDP2, 2x2 ranks cut matrices": ({CUTTING: 2}, 4),
    "FSDP2, 2 ranks share sequences of 2 that cut matrices": ({CUTTING: 2, SHARING: 2}, 4),
}
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "one process, a row at a time": ({"micro_train_batch_size_per_gpu": 1}, 1),
    "one process, all rows at once": ({"micro_train_batch_size_per_gpu": 8}, 1),
    "FSDP2, a row at a time": ({"micro_train_batch_size_per_gpu": 1}, 2),
    "FSDP2, three rows and one": ({"micro_train_batch_size_per_gpu": 3}, 2),
    "FSDP2, padded": ({"use_sample_packing": False}, 2),
    "FSDP2, recomputing": ({"recompute_activations": True}, 2),
    "FSDP2, resting on the host": ({FSDP + "cpu_offload": True}, 2),
    "FSDP2, keeping weights after forward": ({FSDP + "reshard_after_forward": False}, 2),
    "FSDP2, resharding to 2 of 4 ranks": ({FSDP + "reshard_after_forward": 2}, 4),
    "FSDP2, attention alone wrapped": (
        {FSDP + "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen2Attention"]}},
        2,
    ),
    "ZeRO-2, a row at a time": ({**DEEPSPEED, ZERO + "stage": 2, "micro_train_batch_size_per_gpu": 1}, 2),
    "ZeRO-2, offloaded optimizer": ({**DEEPSPEED, ZERO + "stage": 2, ZERO + "offload_optimizer.device": "cpu"}, 2),
    "ZeRO-3, three rows and one": ({**DEEPSPEED, "micro_train_batch_size_per_gpu": 3}, 2),
    "ZeRO-3, padded, recomputing": ({**DEEPSPEED, "use_sample_packing": False, "recompute_activations": True}, 2),
    "ZeRO-3, all sharded": ({**DEEPSPEED, ZERO + "stage3_param_persistence_threshold": 0}, 2),
    "ZeRO-3, offloaded": (
        {**DEEPSPEED, ZERO + "offload_param.device": "cpu", ZERO + "offload_optimizer.device": "cpu"},
        2,
    ),
    "FSDP2, three micro-batches at least": ({"max_tokens_per_microbatch": 1000, "min_microbatches": 3}, 2),
    "2 ranks share keys, a row at a time": ({CONTEXT: 2, "micro_train_batch_size_per_gpu": 1}, 2),
    "2 ranks share keys, recomputing": ({CONTEXT: 2, "recompute_activations": True}, 2),
    "2x2 ranks share keys under a budget": ({CONTEXT: 2, "max_tokens_per_microbatch": 25}, 4),
    "ZeRO-2, 2 ranks share keys": ({**DEEPSPEED, ZERO + "stage": 2, CONTEXT: 2}, 2),
    "ZeRO-3, 2 ranks share keys": ({**DEEPSPEED, CONTEXT: 2}, 2),
    "2 ranks cut matrices, a row at a time": ({CUTTING: 2, "micro_train_batch_size_per_gpu": 1}, 2),
    "2 ranks cut matrices, recomputing": ({CUTTING: 2, "recompute_activations": True}, 2),
    "ZeRO-0, 2 ranks cut matrices, a row at a time": (
        {**DEEPSPEED, ZERO + "stage": 0, CUTTING: 2, "micro_train_batch_size_per_gpu": 1},
        2,
    ),
    "ZeRO-2, 2 ranks cut matrices, recomputing": (
        {**DEEPSPEED, ZERO + "stage": 2, CUTTING: 2, "recompute_activations": True},
        2,
    ),
    "ZeRO-2, 2 ranks cut matrices, padded": (
        {**DEEPSPEED, ZERO + "stage": 2, CUTTING: 2, "use_sample_packing": False},
        2,
    ),
    "ZeRO-3, 2 ranks cut matrices, all sharded": (
        {**DEEPSPEED, CUTTING: 2, ZERO + "stage3_param_persistence_threshold": 0},
        2,
    ),
    "2 ranks cut matrices, padded": ({CUTTING: 2, "use_sample_packing": False}, 2),
    "2x2 ranks cut matrices, replicating their parts": ({CUTTING: 2, FSDP + "fsdp_size": 1}, 4),
    "2x2 ranks cut matrices under a budget": ({CUTTING: 2, "max_tokens_per_microbatch": 25}, 4),
    "2 ranks share sequences, a row at a time": ({SHARING: 2, "micro_train_batch_size_per_gpu": 1}, 2),
    "2 ranks share sequences, recomputing": ({SHARING: 2, "recompute_activations": True}, 2),
    "2x2 ranks share sequences under a budget": ({SHARING: 2, "max_tokens_per_microbatch": 25}, 4),
    "ZeRO-2, 2 ranks share sequences": ({**DEEPSPEED, ZERO + "stage": 2, SHARING: 2}, 2),
    "ZeRO-3, 2 ranks share sequences": ({**DEEPSPEED, SHARING: 2}, 2),
}
STEPS = 5


class Spread:
    """Learners by name of the way they are spread."""

    def __init__(self, pool: Pool, zero_pool: Callable[[int], Pool], small: TrainerConfig) -> None:
        """`zero_pool` has the processes for DeepSpeed on that many ranks."""
        self._pool, self._zero_pool, self._small = pool, zero_pool, small

    def policy(self, changes: dict[str, Any], ranks: int) -> LearnerGroup[PolicyWorker]:
        trainer = changed(self._small, changes)
        objective = policy_objective(trainer.algorithm)
        together = replicas(ranks, inner=sharing_rows(trainer.policy))
        group = self.start(partial(PolicyWorker, trainer, objective), ranks, trainer.strategy, together)
        return LearnerGroup(group, objective, token_budget(trainer), replicas=together)

    def start(self, maker: Any, ranks: int, strategy: str, together: Replicas | None = None) -> Group[Any]:
        """In this process where there is one rank."""
        if ranks == 1:
            return Group([LocalHandle("rank-0", maker())])
        pool = self._zero_pool(ranks) if strategy == "deepspeed" else self._pool
        return pool.start(maker, ranks, together)


def sharing_rows(model: PolicyConfig | CriticConfig) -> int:
    """Ranks that compute on the same rows."""
    return model.sequence_parallel_size * model.context_parallel_size * model.tensor_parallel_size


def changed(trainer: TrainerConfig, changes: dict[str, Any]) -> TrainerConfig:
    for path, value in changes.items():
        trainer = evolve_at(trainer, path, value)
    return trainer


@attrs.frozen(eq=False)
class Trained:
    """What five steps of a learner looked like."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    scores: Tensor


@pytest.fixture(scope="module")
def spread(pool: Pool, small: TrainerConfig, request: pytest.FixtureRequest) -> Spread:
    names = {2: "zero_pool", 4: "wide_zero_pool"}
    return Spread(pool, lambda ranks: request.getfixturevalue(names[ranks]), small)


def mini_batch(step: int, rows: int = 8) -> TrainingBatch:
    """With old and reference log-probabilities, so that the loss depends on the weights."""
    plain = batch(rows, seed=step)
    generator = torch.Generator().manual_seed(step)
    noise = [torch.randn(plain.input_ids.shape, generator=generator) for _ in range(2)]
    old, ref = (torch.where(plain.loss_mask, -6 + 2 * each, 0.0) for each in noise)
    return plain.given(old_logprobs=old, ref_logprobs=ref, rollout_logprobs=old)


async def course(learner: LearnerGroup[PolicyWorker]) -> Trained:
    metrics = [await learner.update(mini_batch(step)) for step in range(STEPS)]
    return Trained(metrics, await weights_of(learner), await learner.score(batch(7)))


async def weights_of(learner: LearnerGroup[PolicyWorker]) -> dict[str, Tensor]:
    return await learner.stream(copies)


async def stored(
    learner: LearnerGroup[PolicyWorker] | LearnerGroup[CriticWorker], folder: Path
) -> tuple[StoredTensors, dict[str, Any]]:
    """The learner's state, out of the files that its ranks wrote."""
    numbers, size = await learner.stage()
    files = await learner.write_staged(Disk(folder), "saved")
    tensors = StoredTensors(Disk(folder), "saved", tuple(file.name for file in files))
    assert size == sum(tensor.nbytes for tensor in tensors.values()), "each number is stored once"
    assert len(files) == len(learner.ranks)
    return tensors, numbers


def changed_state(tensors: StoredTensors, name: str, changes: dict[str, Tensor | None]) -> StoredTensors:
    """The same in one file, with other tensors, and without those that are None."""
    kept = {each: tensor for each, tensor in (dict(tensors) | changes).items() if tensor is not None}
    tensor_shards = [TensorShard.whole(each, tensor) for each, tensor in kept.items()]
    return StoredTensors(tensors.storage, "saved", (write_shards(tensor_shards, tensors.storage, "saved", name).name,))


def copies(weights: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights}


@pytest.fixture(scope="module")
def alone(spread: Spread) -> Trained:
    return asyncio.run(course(spread.policy({}, 1)))


def assert_same_numbers(one: dict[str, float], other: dict[str, float]) -> None:
    """To 1e-5, relative or absolute."""
    assert other == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in one.items()}


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=1e-5, rtol=1e-5)


ONE_OF_EACH_KIND = (
    "FSDP2, 2x2 ranks share sequences",
    "FSDP2, 2 ranks share keys of 2 that share sequences",
    "FSDP2, 2x2 ranks cut matrices",
    "FSDP2, 4 ranks share sequences and 2 key heads",
    "FSDP2 hybrid 2x2",
    "FSDP2 on 2 ranks",
    "FSDP2, attention alone wrapped",
    "FSDP2, padded",
    "ZeRO-2, 2 ranks cut matrices",
    "ZeRO-2 on 2 ranks",
    "ZeRO-2, a row at a time",
    "ZeRO-3 on 2 ranks",
    "one process, a row at a time",
)


@pytest.mark.parametrize("name", long_except([*WAYS, *VARIANTS], *ONE_OF_EACH_KIND))
async def test_five_steps_are_those_of_one_process(name: str, spread: Spread, alone: Trained) -> None:
    other = await course(spread.policy(*(WAYS | VARIANTS)[name]))
    for one, two in zip(alone.metrics, other.metrics, strict=True):
        assert_same_numbers(one, two)
    assert_same_weights(alone.weights, other.weights)
    torch.testing.assert_close(other.scores, alone.scores, atol=2e-5, rtol=1e-5)


def test_the_losses_of_the_five_steps_differ_so_that_their_equality_says_something(alone: Trained) -> None:
    losses = [metrics["final_loss"] for metrics in alone.metrics]
    assert min(abs(one - two) for one in losses for two in losses if one is not two) > 1e-3


@pytest.mark.parametrize("name", long_except(["FSDP2 on 4 ranks", "ZeRO-3 on 2 ranks"], "FSDP2 on 4 ranks"))
async def test_a_model_that_has_not_learned_scores_as_it_was_loaded(name: str, spread: Spread) -> None:
    one, other = spread.policy({}, 1), spread.policy(*WAYS[name])
    rows = batch(4)
    torch.testing.assert_close(await other.score(rows), await one.score(rows), atol=1e-6, rtol=1e-6)
    assert_same_weights(await weights_of(one), await weights_of(other))


CUT, CUT_BY_DEEPSPEED = "FSDP2, 2 ranks cut matrices", "ZeRO-2, 2 ranks cut matrices"
MIXTURES = ("qwen3_moe", "mixtral")
OTHER_KINDS = [
    (kind, name)
    for kind in ("qwen2", "qwen3", "llama", *MIXTURES)
    for name in ("FSDP2 on 2 ranks", CUT, "ZeRO-3 on 2 ranks", CUT_BY_DEEPSPEED)
    if not (kind in MIXTURES and name in (CUT, CUT_BY_DEEPSPEED))  # see the next test
]


@pytest.mark.parametrize("way", long_except(OTHER_KINDS, *(each for each in OTHER_KINDS if each[0] == "qwen3")))
async def test_models_of_other_kinds_start_and_learn_alike(
    way: tuple[str, str], spread: Spread, tmp_path: Path
) -> None:
    kind, name = way
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
@pytest.mark.parametrize("way", [CUT, CUT_BY_DEEPSPEED])
def test_matrices_of_a_mixture_of_experts_are_not_cut(kind: str, way: str, spread: Spread, tmp_path: Path) -> None:
    nano_model(kind).save_pretrained(tmp_path)
    changes, ranks = WAYS[way]
    with pytest.raises(ModelError, match="tensor_parallel_size"):
        spread.policy(changes | {"policy.model.path": str(tmp_path)}, ranks)


@pytest.mark.parametrize(
    "name", long_except(["FSDP2 on 2 ranks", "ZeRO-2 on 2 ranks", "ZeRO-3 on 2 ranks"], "FSDP2 on 2 ranks")
)
async def test_rows_that_do_not_divide_and_ranks_without_a_token_change_nothing(name: str, spread: Spread) -> None:
    one, other = spread.policy({}, 1), spread.policy(*WAYS[name])
    uneven = mini_batch(0, rows=7)
    lopsided = uneven.given(loss_mask=uneven.loss_mask & (torch.arange(7) < 4).unsqueeze(1))
    for rows in (uneven, lopsided):
        assert_same_numbers(await one.update(rows), await other.update(rows))
    assert_same_weights(await weights_of(one), await weights_of(other))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks"),
        ("ZeRO-3 on 2 ranks", None),
        ("ZeRO-1 on 2 ranks", "FSDP2 on 4 ranks"),
        ("FSDP2, 2x2 ranks cut matrices", None),
        ("ZeRO-2, 2 ranks cut matrices", None),
        *(
            pytest.param(saved, loaded, marks=pytest.mark.long)
            for saved, loaded in (
                ("ZeRO-0, 2 ranks cut matrices", "ZeRO-1, 2 ranks cut matrices"),
                ("ZeRO-1, 2 ranks cut matrices", "ZeRO-3, 2 ranks cut matrices"),
                ("ZeRO-3, 2 ranks cut matrices", "FSDP2, 2 ranks cut matrices"),
                ("FSDP2 on 4 ranks", "ZeRO-0, 2 ranks cut matrices"),
                ("ZeRO-2 on 2 ranks", "ZeRO-2, 2x2 ranks cut matrices"),
                ("ZeRO-2, 2x2 ranks cut matrices", "ZeRO-3, 2x2 ranks cut matrices"),
                ("ZeRO-3, 2x2 ranks cut matrices", None),
            )
        ),
        pytest.param("FSDP2, 2 ranks cut matrices", "ZeRO-3 on 2 ranks", marks=pytest.mark.long),
        pytest.param("FSDP2, 2 ranks cut matrices", "FSDP2, 2x2 ranks cut matrices", marks=pytest.mark.long),
        pytest.param("ZeRO-2 on 2 ranks", "FSDP2, 2 ranks cut matrices", marks=pytest.mark.long),
        pytest.param("FSDP2 hybrid 2x2", "FSDP2, 2x2 ranks cut matrices", marks=pytest.mark.long),
        pytest.param("FSDP2 on 2 ranks", None, marks=pytest.mark.long),
        pytest.param("FSDP2 on 2 ranks", "FSDP2 on 4 ranks", marks=pytest.mark.long),
        pytest.param("FSDP2 hybrid 2x2", None, marks=pytest.mark.long),
        pytest.param("FSDP2 on 2 ranks", "ZeRO-0 on 2 ranks", marks=pytest.mark.long),
        pytest.param("FSDP2 on 2 ranks", "ZeRO-2 on 2 ranks", marks=pytest.mark.long),
        pytest.param("ZeRO-2 on 2 ranks", "ZeRO-3 on 2 ranks", marks=pytest.mark.long),
        pytest.param("ZeRO-0 on 2 ranks", "FSDP2 hybrid 2x2", marks=pytest.mark.long),
    ],
)
async def test_a_state_goes_on_under_another_strategy_and_on_other_ranks(
    saved: str, loaded: str | None, spread: Spread, alone: Trained, tmp_path: Path
) -> None:
    first = spread.policy(*WAYS[saved])
    for step in range(3):
        await first.update(mini_batch(step))
    tensors, numbers = await stored(first, tmp_path)
    second = spread.policy(*(WAYS[loaded] if loaded else ({}, 1)))
    await second.update(mini_batch(9))  # what is there before is replaced
    await second.load_state(tensors, numbers)
    for step in (3, 4):
        assert_same_numbers(alone.metrics[step], await second.update(mini_batch(step)))
    assert_same_weights(alone.weights, await weights_of(second))


@pytest.mark.parametrize(
    "name",
    long_except(
        ["FSDP2 on 2 ranks", "ZeRO-2 on 2 ranks", "ZeRO-3 on 2 ranks", "ZeRO-2, 2 ranks cut matrices"],
        "ZeRO-2 on 2 ranks",
    ),
)
async def test_a_state_from_before_the_first_step_forgets_later_ones(
    name: str, spread: Spread, alone: Trained, tmp_path: Path
) -> None:
    learner = spread.policy(*WAYS[name])
    tensors, numbers = await stored(learner, tmp_path)
    assert not any(name.startswith("optimizer.") for name in tensors)
    await learner.update(mini_batch(9))
    await learner.load_state(tensors, numbers)
    assert_same_numbers(alone.metrics[0], await learner.update(mini_batch(0)))
    assert_same_numbers(alone.metrics[1], await learner.update(mini_batch(1)))


@pytest.mark.parametrize(
    "name",
    long_except(
        [
            "FSDP2 on 2 ranks",
            "ZeRO-0 on 2 ranks",
            "ZeRO-2 on 2 ranks",
            "ZeRO-3 on 2 ranks",
            "ZeRO-2, 2 ranks cut matrices",
        ],
        "FSDP2 on 2 ranks",
    ),
)
async def test_sgd_learns_and_resumes_alike_however_its_model_is_spread(
    name: str, spread: Spread, tmp_path: Path
) -> None:
    changes, ranks = WAYS[name]
    sgd = {"policy.optimizer_config.optimizer": "sgd", "policy.optimizer_config.lr": 0.1}
    one, other = spread.policy(sgd, 1), spread.policy(changes | sgd, ranks)
    for step in range(2):
        assert_same_numbers(await one.update(mini_batch(step)), await other.update(mini_batch(step)))
    assert_same_weights(await weights_of(one), await weights_of(other))
    tensors, numbers = await stored(other, tmp_path)
    assert not any(each.startswith("optimizer.") for each in tensors)
    await other.update(mini_batch(9))
    await other.load_state(tensors, numbers)
    assert_same_numbers(await one.update(mini_batch(2)), await other.update(mini_batch(2)))


@pytest.mark.long
async def test_weights_are_gathered_between_many_updates(spread: Spread) -> None:
    """Gathers in the background corrupted the heap of a rank, which died after a few dozen of these rounds."""
    learner = spread.policy({}, 2)
    for step in range(200):
        await learner.update(mini_batch(step % STEPS))
        await weights_of(learner)


@pytest.mark.long  # the first run of a machine compiles the kernel
@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_deepspeeds_kernel_for_cpu_memory_learns_as_torchs_adamw_and_resumes(
    stage: int, spread: Spread, tmp_path: Path
) -> None:
    changes = {**DEEPSPEED, ZERO + "stage": stage, ZERO + "offload_optimizer.device": "cpu"}
    kernel = changes | {"policy.optimizer_config.optimizer": "cpu_adamw"}
    one, other = spread.policy({}, 1), spread.policy(kernel, 2)
    for step in range(2):
        assert_same_numbers(await one.update(mini_batch(step)), await other.update(mini_batch(step)))
    tensors, numbers = await stored(other, tmp_path)
    undisturbed = await other.update(mini_batch(2)), await weights_of(other)
    await other.update(mini_batch(9))
    await other.load_state(tensors, numbers)
    assert await other.update(mini_batch(2)) == undisturbed[0]
    assert all(torch.equal(weight, undisturbed[1][key]) for key, weight in (await weights_of(other)).items())
    await one.update(mini_batch(2))
    assert_same_weights(await weights_of(one), undisturbed[1])
    await one.load_state(tensors, numbers)  # the same file, by torch's optimizer
    await one.update(mini_batch(2))
    assert_same_weights(await weights_of(one), undisturbed[1])


MUON = {"policy.optimizer_config.optimizer": "muon", "policy.optimizer_config.lr": 3e-5}
"""Newton-Schulz in bfloat16 magnifies rounding: layouts differ by about one part in a hundred of a step, which is small
beside 1e-5 where the step is."""


@pytest.mark.parametrize(
    "name",
    long_except(
        [
            "one process",
            "FSDP2 on 2 ranks",
            "FSDP2 hybrid 2x2",
            "FSDP2, 2 ranks cut matrices",
            "FSDP2, 2x2 ranks cut matrices",
            "FSDP2, 2 ranks share keys",
            "FSDP2, 2 ranks share keys of 2 that cut matrices",
            "FSDP2, 2 ranks share sequences",
        ],
        "FSDP2 on 2 ranks",
    ),
)
async def test_muon_learns_and_resumes_alike_however_its_matrices_are_spread(
    name: str, spread: Spread, tmp_path: Path
) -> None:
    changes, ranks = WAYS.get(name, ({}, 1))
    one, other = spread.policy(MUON, 1), spread.policy(changes | MUON, ranks)
    for step in range(2):
        assert_same_numbers(await one.update(mini_batch(step)), await other.update(mini_batch(step)))
    tensors, numbers = await stored(other, tmp_path)
    slots = {each.rpartition(".")[2] for each in tensors if each.startswith("optimizer.")}
    assert slots == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    undisturbed = await other.update(mini_batch(2)), await weights_of(other)
    await other.update(mini_batch(9))
    await other.load_state(tensors, numbers)
    resumed = await other.update(mini_batch(2)), await weights_of(other)
    assert resumed[0] == undisturbed[0]
    assert all(torch.equal(weight, resumed[1][key]) for key, weight in undisturbed[1].items())
    assert_same_numbers(await one.update(mini_batch(2)), resumed[0])
    assert_same_weights(await weights_of(one), resumed[1])


@pytest.mark.parametrize(
    "name",
    long_except(
        ["one process", "FSDP2, 2 ranks cut matrices", "ZeRO-2 on 2 ranks", "ZeRO-2, 2 ranks cut matrices"],
        "one process",
    ),
)
@pytest.mark.parametrize("recomputing", long_except([True, False], True))
async def test_dropout_resumes_bit_for_bit_and_scores_are_without(
    name: str, recomputing: bool, spread: Spread, tmp_path: Path
) -> None:
    dropping = {
        "policy.use_dropout": True,
        "policy.model_config_kwargs": {"attention_dropout": 0.3},
        "recompute_activations": recomputing,
    }
    changes, ranks = WAYS.get(name, ({}, 1))
    plain, learner = spread.policy({}, 1), spread.policy(changes | dropping, ranks)
    torch.testing.assert_close(await learner.score(batch(7)), await plain.score(batch(7)), atol=1e-5, rtol=1e-5)
    without, first = await plain.update(mini_batch(0)), await learner.update(mini_batch(0))
    assert first["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-3)
    tensors, numbers = await stored(learner, tmp_path)
    undisturbed = await learner.update(mini_batch(1)), await weights_of(learner)
    await learner.load_state(tensors, numbers)
    resumed = await learner.update(mini_batch(1)), await weights_of(learner)
    assert resumed[0] == undisturbed[0]
    assert all(torch.equal(weight, resumed[1][key]) for key, weight in undisturbed[1].items())


@pytest.mark.parametrize(
    "name",
    long_except(["FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks", "ZeRO-2, 2 ranks cut matrices"], "FSDP2 on 2 ranks"),
)
async def test_weights_that_are_drawn_are_alike_however_a_model_is_spread(name: str, spread: Spread) -> None:
    changes, ranks = WAYS[name]
    drawn = {"policy.model.init_from_scratch": True}
    one, other = spread.policy(drawn, 1), spread.policy(changes | drawn, ranks)
    found = await weights_of(other)
    assert all(torch.equal(weight, found[name]) for name, weight in (await weights_of(one)).items())


@pytest.mark.parametrize("name", ["FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks"])
async def test_the_state_of_another_model_is_refused(name: str, spread: Spread, tmp_path: Path) -> None:
    learner = spread.policy(*WAYS[name])
    tensors, numbers = await stored(learner, tmp_path)
    by_number = changed_state(tensors, "more", {"optimizer.0.exp_avg": torch.zeros(3)})
    with pytest.raises(ResumeError, match="it has optimizer state of '0'"):
        await learner.load_state(by_number, numbers)
    without = changed_state(tensors, "less", {"model.model.norm.weight": None})
    with pytest.raises(ResumeError, match=r"for model\.norm\.weight, of shape \(32,\), it holds nothing"):
        await learner.load_state(without, numbers)


GUARDED = [
    "one process",
    "FSDP2 on 2 ranks",
    "ZeRO-0 on 2 ranks",
    "ZeRO-2 on 2 ranks",
    "ZeRO-3 on 2 ranks",
    *(
        pytest.param(way, marks=pytest.mark.long)
        for way in (
            "FSDP2 on 4 ranks",
            "FSDP2 hybrid 2x2",
            "FSDP2, 2 ranks cut matrices",
            "ZeRO-1 on 2 ranks",
            "ZeRO-0, 2 ranks cut matrices",
            "ZeRO-2, 2 ranks cut matrices",
            "ZeRO-3, 2 ranks cut matrices",
        )
    ),
]
"""Ways whose guards are not the same code come first."""


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize(
    "part",
    long_except(["model.model.norm.weight", "optimizer.model.norm.weight.exp_avg"], "model.model.norm.weight"),
)
async def test_a_state_that_holds_no_number_on_one_rank_is_not_saved(
    name: str, part: str, spread: Spread, tmp_path: Path
) -> None:
    changes, ranks = WAYS.get(name, ({}, 1))
    learner = spread.policy(changes, ranks)
    await learner.update(mini_batch(0))
    tensors, numbers = await stored(learner, tmp_path)
    await learner.refuse_non_finite_state()
    spoilt = tensors[part].clone()
    spoilt[-1] = torch.nan  # the last rank has it
    await learner.load_state(changed_state(tensors, "spoilt", {part: spoilt}), numbers)
    with pytest.raises(NonFiniteError, match=r"of the policy holds NaN or infinity before saving"):
        await learner.refuse_non_finite_state()


@pytest.mark.parametrize("name", GUARDED)
async def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(name: str, spread: Spread) -> None:
    changes, ranks = WAYS.get(name, ({}, 1))
    learner = spread.policy({**changes, "policy.optimizer_config.max_skipped_updates": 1}, ranks)
    twin = spread.policy({}, 1)
    await learner.update(mini_batch(0))
    await twin.update(mini_batch(0))
    good, last = mini_batch(1), torch.arange(8) == 7
    assert good.advantages is not None
    bad = evolve(good, advantages=torch.where(last.unsqueeze(1), torch.nan, good.advantages))
    assert (await learner.update(bad))["skipped_updates"] == 1
    assert_same_weights(await weights_of(twin), await weights_of(learner))
    assert_same_numbers(await twin.update(good), await learner.update(good))
    assert (await learner.update(bad))["skipped_updates"] == 1
    with pytest.raises(NonFiniteError, match=r"2 times in a row.*Lower trainer\.policy\.optimizer_config\.lr"):
        await learner.update(bad)
    assert_same_weights(await weights_of(twin), await weights_of(learner))


@pytest.mark.parametrize(
    "name",
    ["one process", "FSDP2 on 2 ranks", *(pytest.param(way, marks=pytest.mark.long) for way in WAYS if "ZeRO" in way)],
)
async def test_an_infinite_loss_with_a_finite_gradient_on_one_rank_is_skipped_on_all(name: str, spread: Spread) -> None:
    changes, ranks = WAYS.get(name, ({}, 1))
    learner = spread.policy({**changes, "policy.optimizer_config.max_skipped_updates": 1}, ranks)
    before = await weights_of(learner)
    good, last = mini_batch(0), (torch.arange(8) == 7).unsqueeze(1)
    assert good.advantages is not None and good.old_logprobs is not None
    bad = evolve(
        good,
        advantages=torch.where(last & good.loss_mask, -1e36, good.advantages),
        old_logprobs=torch.where(last & good.loss_mask, -90.0, good.old_logprobs),  # e^20 and no gradient
    )
    found = await learner.update(bad)
    assert (found["policy_loss"], found["skipped_updates"]) == (float("inf"), 1.0)
    assert_same_weights(before, await weights_of(learner))
    with pytest.raises(NonFiniteError, match=r"gradient norm is nan \(2 times in a row"):
        await learner.update(bad)


ROUNDED = {**DEEPSPEED, "compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "changes",
    [
        {FSDP + "mixed_precision": MixedPrecisionConfig(param_dtype="bf16", reduce_dtype="fp32")},
        ROUNDED,
        *(pytest.param({**ROUNDED, ZERO + "stage": stage, CUTTING: 2}, marks=pytest.mark.long) for stage in range(4)),
    ],
)
async def test_computing_in_bfloat16_stays_near_float32(
    changes: dict[str, Any], spread: Spread, alone: Trained
) -> None:
    other = await course(spread.policy(changes, 2))
    assert other.metrics[0]["grad_norm"] == pytest.approx(alone.metrics[0]["grad_norm"], rel=0.05)
    assert other.metrics[0]["grad_norm"] != pytest.approx(alone.metrics[0]["grad_norm"], rel=1e-5)
    assert {weight.dtype for weight in other.weights.values()} == {torch.float32}


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "fsdp2"},
        DEEPSPEED,
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


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 1),
        ({}, 2),
        ({"critic.tensor_parallel_size": 2}, 2),
        ({**DEEPSPEED, "critic.deepspeed_config.zero_optimization.stage": 2}, 2),
        (DEEPSPEED, 2),
        ({**DEEPSPEED, "critic.deepspeed_config.zero_optimization.stage": 2, "critic.tensor_parallel_size": 2}, 2),
    ],
)
async def test_a_critic_learns_returns_alike_on_any_number_of_ranks(
    changes: dict[str, Any], ranks: int, spread: Spread, small: TrainerConfig
) -> None:
    objective = ReturnRegression(value_clip=None)
    rows = batch(8)
    rows = rows.given(returns=torch.where(rows.loss_mask, 1.0, 0.0))
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
    names = [name for name, _, _ in await critic.metadata()]
    assert names[-1] == "value_head.weight" and "lm_head.weight" not in names


def test_a_wrap_policy_that_names_no_module_is_refused(pool: Pool, small: TrainerConfig) -> None:
    wrong = evolve_at(small, FSDP + "wrap_policy", {"transformer_layer_cls_to_wrap": ["LlamaLayer"]})
    with pytest.raises(ModelError, match="names LlamaLayer, and the model has no such module"):
        pool.start(partial(PolicyWorker, wrong, policy_objective(wrong.algorithm)), 2)


async def test_all_ranks_are_free_again_when_a_consumer_of_the_weights_fails(spread: Spread) -> None:
    learner = spread.policy(*WAYS["FSDP2 on 2 ranks"])
    with pytest.raises(ZeroDivisionError):
        await learner.stream(fail_at_the_second)
    assert len(await weights_of(learner)) == len(await learner.metadata())


def fail_at_the_second(weights: Any) -> None:
    next(weights)
    next(weights)
    raise ZeroDivisionError


async def test_metadata_are_what_is_streamed(spread: Spread) -> None:
    for name in ("FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks", CUT_BY_DEEPSPEED):
        learner = spread.policy(*WAYS[name])
        streamed = await weights_of(learner)
        expected = [(name, tuple(weight.shape), "float32") for name, weight in streamed.items()]
        assert await learner.metadata() == expected


async def test_weights_that_are_rounded_before_they_travel_are_those_that_are_rounded_after(spread: Spread) -> None:
    for name in ("FSDP2, 2 ranks cut matrices", "FSDP2 on 2 ranks", "ZeRO-3 on 2 ranks", CUT_BY_DEEPSPEED):
        learner = spread.policy(*WAYS[name])
        early = await learner.stream(copies, dtype="bfloat16")
        for weight_name, weight in (await weights_of(learner)).items():
            assert torch.equal(early[weight_name], weight.to(torch.bfloat16))


def test_weights_are_on_their_way_as_far_as_the_bytes_go() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for size in (3, 4, 2, 9, 1):
            taken.append(size)
            yield size

    flying = ahead(items(), lambda size: size, 6)
    seen = [(item, list(taken)) for item in flying]
    assert [item for item, _ in seen] == [3, 4, 2, 9, 1]
    assert seen[0] == (3, [3, 4])  # the second is on its way while the first is used
    assert seen[1] == (4, [3, 4, 2, 9])


ADAPTER = {
    "policy.model.lora": SkyRLLoraConfig(rank=4, alpha=8),
    "policy.optimizer_config.adam_eps": 1e-6,  # by AdamW's usual 1e-8 a gradient that is rounding alone is a whole step
}


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2 on 2 ranks",
        "FSDP2, 2 ranks cut matrices",
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in (
                "FSDP2 hybrid 2x2",
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
    assert [name for name, *_ in await other.metadata()] == list(merged)
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(merged["model.norm.weight"], before["model.norm.weight"])
    assert_same_weights(await one.stream(copies, adapter=True), await other.stream(copies, adapter=True))
