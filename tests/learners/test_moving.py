"""Leaving a device to others and coming back, seen by a mover that moves nothing and writes down what it was asked."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyrl.config import TrainerConfig
from skyrl.learners.offloading import HOST, DeviceMover
from skyrl.learners.workers.roles import RefWorker
from skyrl.training.objective import policy_objective
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.learners.updating import LearnerGroup, PolicyWorker

pytestmark = pytest.mark.xdist_group("ranks")


class Recorder(DeviceMover):
    """Takes every tensor for one that is elsewhere."""

    def __init__(self) -> None:
        self.moved: list[tuple[tuple[int, ...], torch.device]] = []

    def is_host(self, device: torch.device) -> bool:
        return False

    def move(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, int]:
        self.moved.append((tuple(tensor.shape), device))
        return tensor, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes

    def settle(self, source: torch.device) -> None:
        self.moved.append(((), source))


def worker(trainer: TrainerConfig, mover: DeviceMover | None = None) -> PolicyWorker:
    return PolicyWorker(trainer, policy_objective(trainer.algorithm), mover=mover)


def size_of(policy: PolicyWorker) -> int:
    return sum(parameter.nbytes for parameter in policy.model.parameters())


def buffers_of(policy: PolicyWorker) -> int:
    return sum(buffer.nbytes for buffer in policy.model.buffers())


async def test_the_model_goes_first_then_two_slots_for_each_weight(small: TrainerConfig) -> None:
    recorder = Recorder()
    policy = worker(small, recorder)
    await policy.update(batch().with_fields(ref_logprobs=torch.zeros(6, 12)))
    assert await policy.offload() == 3 * size_of(policy) + buffers_of(policy)
    shapes = [shape for shape, _ in recorder.moved]
    parameters = [tuple(parameter.shape) for parameter in policy.model.parameters()]
    buffers = len(list(policy.model.buffers()))
    assert sorted(shapes[: len(parameters) + buffers]) == sorted(
        [*parameters, *(tuple(buffer.shape) for buffer in policy.model.buffers())]
    )
    stepped = [tuple(parameter.shape) for group in policy.optimizer.param_groups for parameter in group["params"]]
    assert sorted(stepped) == sorted(parameters)
    assert shapes[len(parameters) + buffers :] == [*(shape for shape in stepped for _ in range(2)), ()]  # all settled
    assert all(parameter.grad is None for parameter in policy.model.parameters())


async def test_parts_move_alone(small: TrainerConfig) -> None:
    policy = worker(small, Recorder())
    await policy.update(batch().with_fields(ref_logprobs=torch.zeros(6, 12)))
    assert await policy.offload(model=False) == 2 * size_of(policy)
    assert await policy.onload(optimizer=False) == size_of(policy) + buffers_of(policy)


async def test_each_rank_moves_its_shards(pool: Pool, small: TrainerConfig) -> None:
    objective = policy_objective(small.algorithm)
    learner = LearnerGroup(pool.start(partial(PolicyWorker, small, objective, mover=Recorder()), 2), objective)
    await learner.update(batch().with_fields(ref_logprobs=torch.zeros(6, 12)))
    unsharded = worker(small)
    assert await learner.offload() == 3 * size_of(unsharded) + 2 * buffers_of(unsharded)
    assert await learner.onload(optimizer=False) == size_of(unsharded) + 2 * buffers_of(unsharded)


async def test_on_a_cpu_nothing_moves_and_learning_goes_on(small: TrainerConfig) -> None:
    stays, goes = worker(small), worker(small)
    rows = batch().with_fields(ref_logprobs=torch.zeros(6, 12))
    for policy in (stays, goes):
        await policy.update(rows)
    assert (await goes.offload(), await goes.onload()) == (0, 0)
    assert await goes.update(rows) == await stays.update(rows)


@pytest.mark.gpu
async def test_on_a_gpu_the_memory_is_given_back_and_learning_goes_on(small: TrainerConfig) -> None:
    trainer = attrs.evolve(small, device="cuda")
    stays, goes = worker(trainer), worker(trainer)
    rows = batch().with_fields(ref_logprobs=torch.zeros(6, 12))
    for policy in (stays, goes):
        await policy.update(rows)
    before = torch.cuda.memory_allocated()
    moved = await goes.offload()
    assert before - torch.cuda.memory_allocated() >= moved >= 3 * size_of(goes)
    assert {parameter.device for parameter in goes.model.parameters()} == {HOST}
    assert all(parameter.is_pinned() for parameter in goes.model.parameters())
    assert await goes.onload() == moved
    assert await goes.update(rows) == await stays.update(rows)


async def test_a_reference_has_only_weights_to_move(small: TrainerConfig) -> None:
    reference = RefWorker(small, mover=Recorder())
    weights = sum(parameter.nbytes for parameter in reference.model.parameters())
    assert await reference.offload() == weights + sum(buffer.nbytes for buffer in reference.model.buffers())
