"""Ways of spreading a learner over ranks, and what its tests compare: courses of steps, weights, stored states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.checkpoint.shards import StoredTensors, TensorShard, write_shards
from skyrl.config import CriticConfig, PolicyConfig, TrainerConfig
from skyrl.learners.workers.model_worker import token_budget
from skyrl.planning.replicas import Replicas, replicas
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.storage.disk import Disk
from skyrl.training.objective import policy_objective
from skyrl.tree import evolve_at
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.learners.updating import CriticWorker, LearnerGroup, PolicyWorker

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
    "FSDP2, attention within wrapped layers": (
        {FSDP + "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer", "Qwen2Attention"]}},
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
CUT, CUT_BY_DEEPSPEED = "FSDP2, 2 ranks cut matrices", "ZeRO-2, 2 ranks cut matrices"
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


def mini_batch(step: int, rows: int = 8) -> TrainingBatch:
    """With old and reference log-probabilities, so that the loss depends on the weights."""
    plain = batch(rows, seed=step)
    generator = torch.Generator().manual_seed(step)
    noise = [torch.randn(plain.input_ids.shape, generator=generator) for _ in range(2)]
    old, ref = (torch.where(plain.loss_mask, -6 + 2 * draw, 0.0) for draw in noise)
    return plain.with_fields(old_logprobs=old, ref_logprobs=ref, rollout_logprobs=old)


async def course(learner: LearnerGroup[PolicyWorker]) -> Trained:
    metrics = [await learner.update(mini_batch(step)) for step in range(STEPS)]
    return Trained(metrics, await weights_of(learner), await learner.score(batch(7)))


async def weights_of(learner: LearnerGroup[PolicyWorker]) -> dict[str, Tensor]:
    return await learner.export_weights(copies)


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
    kept = {key: tensor for key, tensor in (dict(tensors) | changes).items() if tensor is not None}
    tensor_shards = [TensorShard.from_full_tensor(key, tensor) for key, tensor in kept.items()]
    return StoredTensors(tensors.storage, "saved", (write_shards(tensor_shards, tensors.storage, "saved", name).name,))


def copies(weights: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights}


def assert_same_numbers(one: dict[str, float], other: dict[str, float]) -> None:
    """To 1e-5, relative or absolute."""
    assert other == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in one.items()}


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=1e-5, rtol=1e-5)
