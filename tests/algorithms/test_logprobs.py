"""Log-probabilities of large logits: all ways to compute them agree with float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from skyrl.algorithms import linear_logprobs
from skyrl.algorithms.logprobs import statistics, token_logprobs
from skyrl.config import SamplingParams
from skyrl.inference.sampling import RowSettings, choose

ROWS, VOCABULARY = 12, 40
Way = Callable[[Tensor, Tensor, float], Tensor]


def problem(size: float) -> tuple[Tensor, Tensor]:
    """Logits (R, V) around `size`, and one token of each row."""
    numbers = torch.Generator().manual_seed(3)
    return size + torch.randn(ROWS, VOCABULARY, generator=numbers), torch.arange(ROWS) * 3


def exact(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    logs = torch.log_softmax(logits.double() / temperature, -1)
    return logs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def from_hidden_states(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The logits are the hidden states, and the output matrix is the identity."""
    unit = torch.eye(VOCABULARY)
    return linear_logprobs.linear_logprobs(logits, unit, tokens, temperature=temperature)[0]


def reported(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """By the engine, at the numbers with which it draws these tokens."""
    settings = RowSettings.of([SamplingParams(temperature=temperature)] * ROWS, "cpu")
    probabilities = (logits / temperature).softmax(-1)
    uniform = (probabilities.cumsum(-1) - probabilities / 2).gather(1, tokens.unsqueeze(1)).squeeze(1)
    drawn, logprobs = choose(logits, settings, uniform.double())
    assert torch.equal(drawn, tokens)
    return logprobs


WAYS: dict[str, Way] = {
    "table": lambda logits, tokens, temperature: token_logprobs(logits, tokens, temperature=temperature),
    "half": lambda logits, tokens, temperature: token_logprobs(logits.bfloat16(), tokens, temperature=temperature),
    "engine": reported,
    "plain": from_hidden_states,
    "chunks": from_hidden_states,
    "compiled": lambda logits, tokens, temperature: statistics(logits / temperature, tokens)[0],
}


CASES = [(method, temperature) for method in WAYS for temperature in (1.0, 0.5)]
CASES += [(method, 0.7) for method in ("table", "half", "engine", "plain")]  # the others divide first, which rounds


@pytest.mark.parametrize("size", [0.0, 70.0, -7e3, 3e4, 1e6])
@pytest.mark.parametrize(("method", "temperature"), CASES)
def test_large_logits_cost_no_precision(
    method: str, size: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "chunks":
        monkeypatch.setattr(linear_logprobs, "PLAIN_UP_TO", 0)
        monkeypatch.setattr(linear_logprobs, "LOGITS_AT_A_TIME", 5 * VOCABULARY)
    logits, tokens = problem(size)
    expected = exact(logits.bfloat16() if method == "half" else logits, tokens, temperature)
    torch.testing.assert_close(WAYS[method](logits, tokens, temperature).double(), expected, atol=3e-6, rtol=1e-6)


def test_the_gradient_is_that_of_log_softmax() -> None:
    logits, tokens = problem(50.0)
    actual, expected = logits.clone().requires_grad_(), logits.double().requires_grad_()
    shares = torch.arange(1.0, ROWS + 1)
    (token_logprobs(actual, tokens, temperature=0.7) * shares).sum().backward()
    (exact(expected, tokens, 0.7) * shares).sum().backward()
    assert actual.grad is not None and expected.grad is not None
    torch.testing.assert_close(actual.grad.double(), expected.grad, atol=1e-5, rtol=1e-5)
