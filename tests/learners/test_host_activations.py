"""Inputs of recomputed layers wait for backward on the host, and nothing else does."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from skyrl.config import TrainerConfig
from skyrl.learners import offloading
from skyrl.learners.offloading import HostActivations
from skyrl.learners.workers import learning_worker
from skyrl.training.objective import policy_objective
from tests.learners.rows import batch
from tests.learners.updating import PolicyWorker

ROWS = batch().with_fields(ref_logprobs=torch.zeros(6, 12))


class Copying(HostActivations):
    """Takes every activation for one that is worth the way, and notes what comes and goes."""

    log: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])

    def wants(self, tensor: Tensor) -> bool:
        return not tensor.is_leaf

    def send(self, tensor: Tensor) -> Tensor:
        self.log[0].append(tuple(tensor.shape))
        return tensor.detach().clone()

    def fetch(self, copy: Tensor, device: torch.device) -> Tensor:
        self.log[1].append(tuple(copy.shape))
        return copy


def gradients(worker: PolicyWorker) -> list[Tensor]:
    worker._accumulate(worker.objective.weigh(ROWS), worker.objective)
    return [parameter.grad.clone() for parameter in worker.model.parameters() if parameter.grad is not None]


def worker(trainer: TrainerConfig, **changes: Any) -> PolicyWorker:
    changed = attrs.evolve(trainer, recompute_activations=True, **changes)
    return PolicyWorker(changed, policy_objective(changed.algorithm))


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_input_of_each_layer_goes_and_comes_once_and_the_gradient_is_the_same(
    small: TrainerConfig, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(worker(small, gradient_checkpointing_use_reentrant=reentrant))
    monkeypatch.setattr(learning_worker, "HostActivations", Copying)
    monkeypatch.setattr(Copying, "log", ([], []))
    grads = gradients(worker(small, gradient_checkpointing_use_reentrant=reentrant, offload_activations=True))
    assert all(torch.equal(one, other) for one, other in zip(grads, expected, strict=True))
    went, came = Copying.log
    assert len(went) == 3 * 2  # three micro-batches of two rows, two layers
    assert all(shape[-1] == 32 for shape in went)  # hidden states
    assert sorted(came) == sorted(went)


def test_on_a_cpu_everything_is_on_the_host_already() -> None:
    grown = torch.ones(2**20, requires_grad=True) * 2
    assert not HostActivations().wants(grown)


@pytest.mark.gpu
def test_on_a_gpu_the_gradient_is_the_same_and_small_tensors_stay(
    small: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "SMALLEST", 1)
    trainer = attrs.evolve(small, device="cuda")
    expected = gradients(worker(trainer))
    grads = gradients(worker(trainer, offload_activations=True))
    assert all(torch.equal(one, other) for one, other in zip(grads, expected, strict=True))
    monkeypatch.undo()
    assert not HostActivations().wants(torch.ones(8, device="cuda", requires_grad=True) * 2)


@pytest.mark.gpu
def test_a_gpu_has_the_memory_of_what_waits_on_the_host() -> None:
    activations = HostActivations()
    leaf = torch.ones(64, 2**20, device="cuda", requires_grad=True)
    grown = leaf * 2
    assert activations.wants(grown)
    copy = activations.send(grown)
    assert copy.is_pinned()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    expected = grown.detach().cpu()
    del grown
    assert before - torch.cuda.memory_allocated() == 64 * 2**20 * 4
    assert torch.equal(activations.fetch(copy, leaf.device).cpu(), expected)
