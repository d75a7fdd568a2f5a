"""What of a model under Megatron leaves a GPU, seen on stand-ins for Megatron-core's objects."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from skyrl.learners.offloading import BufferMemory, DeviceMover, move_optimizer


def test_views_of_a_buffer_are_what_they_were_when_its_memory_has_come_back() -> None:
    weights, gradients = torch.arange(6.0), torch.ones(6)
    parameter = weights[2:5].view(3)
    buffer = SimpleNamespace(param_data=weights, grad_data=gradients)
    memory = BufferMemory(SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[]))
    assert memory.leave() == 48
    assert weights.untyped_storage().size() == gradients.untyped_storage().size() == 0
    assert memory.leave() == 0, "it has left"
    assert memory.come_back() == 48
    assert parameter.tolist() == [2.0, 3.0, 4.0]
    assert gradients.tolist() == [0.0] * 6, "gradients are dropped"


def test_an_optimizer_without_buffers_of_weights_leaves_its_state_alone() -> None:
    weight = torch.ones(2)
    state = {weight: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}}
    outer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=SimpleNamespace(state=state))])
    meta = torch.device("meta")
    assert move_optimizer(outer, meta, DeviceMover()) == 8
    assert state[weight]["exp_avg"].device == meta
    assert state[weight]["step"].device.type == "cpu", "a number that AdamW keeps on the host"
