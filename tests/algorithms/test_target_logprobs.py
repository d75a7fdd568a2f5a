"""Log-probabilities of several targets with low-rank updates of the output matrix, against a plain softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyrl.algorithms import linear_logprobs, target_logprobs
from skyrl.algorithms.stretch_updates import StretchUpdate, with_updates

N, H, V, K = 11, 6, 13, 3


def _factors(rank: int) -> list[Tensor]:
    return [torch.randn(rank, H, requires_grad=True), torch.randn(V, rank, requires_grad=True)]


def _updates(pairs: list[list[Tensor]], row_ranges: list[range], gradients: list[list[Tensor]]) -> list[StretchUpdate]:
    return [
        StretchUpdate(start=rows.start, stop=rows.stop, a=a.detach(), b=b.detach(), scale=0.5, for_a=for_a, for_b=for_b)
        for rows, (a, b), (for_a, for_b) in zip(row_ranges, pairs, gradients, strict=True)
    ]


def _plain(hidden: Tensor, weight: Tensor, pairs: list[list[Tensor]], row_ranges: list[range]) -> Tensor:
    product = hidden @ weight.T
    for rows, (a, b) in zip(row_ranges, pairs, strict=True):
        inside = torch.zeros(N, 1)
        inside[rows.start : rows.stop] = 1.0
        product = product + inside * 0.5 * (hidden @ a.T @ b.T)
    return product


PLACES = [range(1, 4), range(4, 9)]


@pytest.mark.parametrize("together", [100, 3])
@pytest.mark.parametrize("kept", [0, 10**6])
def test_several_targets_with_updates_are_those_of_a_softmax(
    together: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logprobs, "logits_at_a_time", lambda device: together * V)
    monkeypatch.setattr(target_logprobs, "kept_bytes", lambda device: kept)
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    pairs, targets, factors = [_factors(2), _factors(4)], torch.randint(0, V, (N, K)), torch.randn(N, K)
    gradients = [[torch.zeros_like(tensor) for tensor in pair] for pair in pairs]
    expected = _plain(hidden, weight, pairs, PLACES).log_softmax(-1).gather(-1, targets)
    (expected * factors).sum().backward()
    plain = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None

    logprobs = target_logprobs.target_logprobs(hidden, weight, targets, _updates(pairs, PLACES, gradients))
    (logprobs * factors).sum().backward()

    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close([hidden.grad, weight.grad], plain)
    torch.testing.assert_close(gradients, [[tensor.grad for tensor in pair] for pair in pairs])


def test_one_target_is_what_linear_logprobs_computes() -> None:
    torch.manual_seed(1)
    hidden, weight, targets = torch.randn(N, H), torch.randn(V, H), torch.randint(0, V, (N,))
    expected, _ = linear_logprobs.linear_logprobs(hidden, weight, targets, temperature=1.0, with_entropy=False)
    torch.testing.assert_close(target_logprobs.target_logprobs(hidden, weight, targets[:, None])[:, 0], expected)


@pytest.mark.parametrize("x_learns", [True, False])
def test_stretches_of_a_layer_have_their_own_updates(x_learns: bool) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(1, N, H, requires_grad=x_learns), torch.randn(V, H)
    pairs, errors = [_factors(2), _factors(4)], torch.randn(1, N, V)
    gradients = [[torch.zeros_like(tensor) for tensor in pair] for pair in pairs]
    expected = _plain(x[0], weight, pairs, PLACES).unsqueeze(0)
    expected.backward(errors)
    for_x, x.grad = x.grad, None

    logits = with_updates(x, x @ weight.T, tuple(_updates(pairs, PLACES, gradients)))
    logits.backward(errors)

    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(gradients, [[tensor.grad for tensor in pair] for pair in pairs])
    if x_learns:
        torch.testing.assert_close(x.grad, for_x)
