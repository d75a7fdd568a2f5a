"""A small problem for log-probabilities of tokens, and the comparison with a whole table of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl.algorithms.linear_logprobs import linear_logprobs

TOKENS, WIDTH, VOCABULARY = 7, 16, 150


def problem(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, generator=generator) for rows in (TOKENS, VOCABULARY))
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    leaves = (tensor.to(device, dtype).requires_grad_() for tensor in (hidden, weight))
    return next(leaves), next(leaves), targets.to(device)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    return logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logs.exp() * logs).sum(-1)


def check(dtype: torch.dtype, temperature: float, slope: float, device: str, tolerance: float) -> None:
    """Compare values, and gradients of a sum with other factors for each token, with those of the whole table."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(2, TOKENS, generator=generator).to(device) * torch.tensor([[1.0], [slope]], device=device)
    results = []
    for fused in (True, False):
        hidden, weight, targets = problem(dtype, device)
        if fused:
            logprobs, spread = linear_logprobs(
                hidden, weight, targets, temperature=temperature, entropy_gradient=slope != 0
            )
        else:
            logprobs, spread = naive(hidden, weight, targets, temperature)
        assert spread is not None
        assert hidden.grad is None
        ((logprobs * factors[0]).sum() + (spread * factors[1]).sum()).backward()
        results.append((logprobs, spread, hidden.grad, weight.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
