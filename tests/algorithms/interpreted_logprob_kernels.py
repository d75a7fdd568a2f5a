"""Triton's kernels for log-probabilities: the same values and gradients as from the whole table of logits.

`test_logprob_kernels.py` runs this file in a process in which Triton interprets kernels on the CPU.
"""

from __future__ import annotations

import pytest
import torch

from skyrl.algorithms import linear_logprobs as module
from skyrl.algorithms import logprob_kernels
from skyrl.algorithms.linear_logprobs import linear_logprobs
from tests.algorithms.whole_tables import TOKENS, VOCABULARY, check, problem


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_kernels, "BLOCK", 64)  # three blocks, the last of them not full
    monkeypatch.setattr(module, "has_kernels", lambda device: True)


@pytest.mark.parametrize("kept_bytes", [0, 2**20], ids=["computed again", "kept"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize(("temperature", "slope"), [(1.0, 0.0), (0.7, 0.5)])
def test_values_and_gradients_are_those_of_the_whole_table(
    dtype: torch.dtype,
    tolerance: float,
    temperature: float,
    slope: float,
    kept_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "kept_bytes", lambda device: kept_bytes)
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 3 * VOCABULARY)
    check(dtype, temperature, slope, "cpu", tolerance)


def test_beside_a_frozen_matrix_hidden_states_get_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kept_bytes", lambda device: 0)
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 3 * VOCABULARY)
    hidden, weight, targets = problem(torch.float32)
    shares = torch.linspace(-1, 2, TOKENS)
    expected = linear_logprobs(hidden, weight, targets, temperature=0.7)[0]
    logprobs = linear_logprobs(hidden, weight.detach(), targets, temperature=0.7)[0]
    gradients = [torch.autograd.grad((output * shares).sum(), hidden)[0] for output in (expected, logprobs)]
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(*gradients)


def test_a_token_without_probability_has_no_share_in_entropy_and_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    targets = torch.tensor([1])
    logprobs, spread, norms = logprob_kernels.statistics(logits, targets, 1.0)
    two = torch.tensor([2.0]).log()
    torch.testing.assert_close((logprobs, spread, norms), (-two, two, two))
    ones = torch.ones(1)
    logprob_kernels.overwrite_with_gradient(logits, targets, norms, spread, ones, ones, 1.0)
    torch.testing.assert_close(logits, torch.tensor([[-0.5, 0.5, 0.0, 0.0]]))  # the entropy is at its maximum


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_logits_that_are_no_numbers_show_in_the_log_probability() -> None:
    hidden, weight, targets = problem(torch.float32)
    with torch.no_grad():
        hidden[2] = torch.nan
    logprobs, _ = linear_logprobs(hidden, weight, targets, temperature=1.0)
    assert logprobs.isnan().tolist() == [row == 2 for row in range(TOKENS)]


def test_a_second_backward_pass_computes_the_logits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kept_bytes", lambda device: 2**20)
    hidden, weight, targets = problem(torch.float32)
    logprobs, _ = linear_logprobs(hidden, weight, targets, temperature=1.0)
    first, second = (torch.autograd.grad(logprobs.sum(), [hidden, weight], retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)


def test_no_selected_token_gives_gradients_of_zero() -> None:
    hidden, weight, targets = problem(torch.float32)
    logprobs, _ = linear_logprobs(hidden[:0], weight, targets[:0], temperature=1.0)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    assert not weight.grad.any()
    assert not hidden.grad.any()


@pytest.mark.parametrize("size", [70.0, -7e3, 3e4, 1e6])
def test_large_logits_cost_no_precision(size: float) -> None:
    logits = size + torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(3))
    targets = torch.arange(6) * 3
    expected = torch.log_softmax(logits.double(), -1).gather(1, targets.unsqueeze(1)).squeeze(1)
    logprobs, _, _ = logprob_kernels.statistics(logits, targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, atol=3e-6, rtol=1e-6)
