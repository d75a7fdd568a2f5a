"""Linear layers by oneDNN compute what `nn.Linear` computes, forward and backward, and leave the rest to it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from skyrl.models import onednn
from skyrl.models.onednn import OneDnnLinear, compute_with_onednn, filled, padded_rows


@pytest.fixture(autouse=True)
def fast_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are replaced whatever processor the tests run on."""
    monkeypatch.setattr(onednn, "outruns_mkl", lambda: True)


def two_layers(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128, bias=bias), nn.SiLU(), nn.Linear(128, 64, bias=bias))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_a_plain_layer(bias: bool) -> None:
    plain, x = two_layers(bias), torch.randn(2, 35, 64)  # 70 rows, computed as 72
    fast = copy.deepcopy(plain)
    compute_with_onednn(fast)
    torch.testing.assert_close(fast(x), plain(x), atol=1e-5, rtol=1e-5)
    expected, grads = gradients(plain, x), gradients(fast, x)
    assert len(grads) == len(expected) == 1 + len(list(plain.parameters()))
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_frozen_weight_gets_no_gradient_and_passes_one_on() -> None:
    plain, x = two_layers(True).requires_grad_(False), torch.randn(70, 64)
    fast = copy.deepcopy(plain)
    compute_with_onednn(fast)
    [expected], [grad] = gradients(plain, x), gradients(fast, x)
    torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-4)


def test_the_same_input_gives_the_same_bits_again() -> None:
    model, x = two_layers(True), torch.randn(70, 64)
    compute_with_onednn(model)
    first, second = gradients(model, x), gradients(model, x)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_few_rows_another_type_and_autocast_are_computed_as_before() -> None:
    plain = two_layers(True)
    fast = copy.deepcopy(plain)
    compute_with_onednn(fast)
    few, wide = torch.randn(63, 64), torch.randn(70, 64)
    assert torch.equal(fast(few), plain(few))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(wide), plain(wide))
    assert torch.equal(fast.double()(wide.double()), plain.double()(wide.double()))


def test_the_output_is_no_view_of_another_tensor() -> None:
    model = two_layers(True)
    compute_with_onednn(model)
    assert not model(torch.randn(2, 35, 64))._is_view()  # FSDP2 warns of a module that returns one


def test_parameters_keep_their_names_and_thin_or_foreign_layers_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Own(64, 64), nn.Linear(64, 8))
    names = list(model.state_dict())
    compute_with_onednn(model)
    assert [type(layer) for layer in model] == [OneDnnLinear, Own, nn.Linear]
    assert list(model.state_dict()) == names


def test_a_processor_on_which_mkl_is_as_fast_keeps_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "outruns_mkl", lambda: False)
    model = nn.Sequential(nn.Linear(64, 64))
    compute_with_onednn(model)
    assert type(model[0]) is nn.Linear


def test_numbers_of_rows_are_rounded_up_to_eight_between_two_powers_of_two() -> None:
    assert [padded_rows(rows) for rows in (0, 1, 2, 3, 5, 8, 9, 16)] == [0, 1, 2, 4, 8, 8, 16, 16]
    assert sorted({padded_rows(rows) for rows in range(65, 129)}) == [72, 80, 88, 96, 104, 112, 120, 128]
    assert [padded_rows(rows) for rows in (513, 576, 577, 1024)] == [576, 576, 640, 1024]


def test_rows_are_filled_up_with_zeros() -> None:
    assert filled(torch.ones(3, 2)).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
