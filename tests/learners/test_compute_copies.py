"""Computing with copies of the weights in 16 bits: what the model sees, and where gradients go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from skyrl.learners.data_parallel import computing_in

BFLOAT16 = torch.bfloat16


def tied_model() -> Any:
    """Two layers that share a matrix, and one that does not learn."""
    torch.manual_seed(0)
    first, frozen, last = (nn.Linear(4, 4, bias=False) for _ in range(3))
    last.weight = first.weight
    frozen.requires_grad_(False)
    return nn.Sequential(first, frozen, last)


def test_inside_the_block_the_weights_are_rounded_and_tied_and_afterwards_the_old_ones_again() -> None:
    model = tied_model()
    before = [child.weight for child in model.children()]
    with computing_in(model, BFLOAT16):
        first, frozen, last = (child.weight for child in model.children())
        assert first is last
        assert (first.requires_grad, frozen.requires_grad) == (True, False)
        assert torch.equal(frozen, before[1].to(BFLOAT16))
        assert model(torch.ones(1, 4, dtype=BFLOAT16)).dtype is BFLOAT16
    assert all(now.weight is then for now, then in zip(model.children(), before, strict=True))


def test_gradients_of_several_passes_add_up_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False)
    with computing_in(model, BFLOAT16):
        for factor in (256.0, 1.0):  # 257 has no bfloat16
            model(torch.full((1, 1), factor, dtype=BFLOAT16)).sum().backward()
            assert model.weight.grad is None
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad.item() == 257.0


def test_recomputed_activations_use_the_copies_and_frozen_weights_get_no_gradient() -> None:
    model, rows = tied_model(), torch.randn(3, 4, dtype=BFLOAT16)

    def gradient(recompute: bool) -> Tensor:
        model.zero_grad()
        with computing_in(model, BFLOAT16):
            apply = torch.utils.checkpoint.checkpoint if recompute else lambda block, x, **_: block(x)
            apply(model, rows, use_reentrant=False).sum().backward()
        assert model[1].weight.grad is None
        grad = model[0].weight.grad
        assert isinstance(grad, Tensor)
        return grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


def test_a_model_in_the_type_of_the_computation_stays_as_it_is() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with computing_in(model, torch.float32):
        assert model.weight is weight
