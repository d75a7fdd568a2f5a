"""Log-probabilities of tokens straight from hidden states and the output matrix, without a table of tokens x
vocabulary.

A vocabulary of 150,000 makes that table the largest tensor of training: 8,192 tokens are 5 GB, several times over. Here
it exists for a few hundred tokens at a time, in forward and again in backward, which recomputes it; what is kept for
backward is one number per token. Small tables are not worth the second product: `linear_logprobs` takes the plain path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl.algorithms.logprobs import entropy, token_logprobs
from skyrl.algorithms.shapes import expect_same_shape

PLAIN_UP_TO = 2**26
"""Logits, so 268 MB in float32: about 440 tokens at a vocabulary of 150,000. A GPU may take more."""

LOGITS_AT_A_TIME = 2**25
"""Largest number of logits of a chunk of tokens, in forward and in backward, on a CPU; the least on a GPU."""

SHARE_OF_A_GPU = 64
"""A chunk's logits in float32 take one of so many parts of a GPU's memory, or less; a few such tables exist at once."""


def logits_at_a_time(device: torch.device) -> int:
    """Largest number of logits of a chunk, a power of two: 2^28 on a GPU of 80 GB, which is 1,766 tokens at a
    vocabulary of 152,000. Small chunks leave a GPU idle; on a CPU larger ones are no faster.
    """
    if device.type != "cuda":
        return LOGITS_AT_A_TIME
    logits = torch.cuda.get_device_properties(device).total_memory // (4 * SHARE_OF_A_GPU)
    return max(LOGITS_AT_A_TIME, 1 << (logits.bit_length() - 1))


def _fits_plainly(logits: int, device: torch.device) -> bool:
    """Is the table of all logits small enough to be kept for backward?"""
    return logits <= (max(PLAIN_UP_TO, logits_at_a_time(device)) if device.type == "cuda" else PLAIN_UP_TO)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weight^T / temperature) at the targets, and, if wanted, the entropy of each distribution, in
    nats.

    Shapes: `hidden` (N, H) and `weight` (V, H), of one type, `targets` (N,) int64; both results (N,) float32. Softmax
    is computed in float32 whatever the type. The entropy has a gradient only if that is asked for. Raises ValueError
    for a target of another shape than `hidden` has rows.
    """
    expect_same_shape(hidden=hidden[:, 0], targets=targets)
    if not _fits_plainly(hidden.shape[0] * weight.shape[0], hidden.device):
        apply: Any = _LinearLogprobs.apply
        logprobs, spread = apply(hidden, weight, targets, temperature, with_entropy)
        if not with_entropy:
            return logprobs, None
        return logprobs, spread if entropy_gradient else spread.detach()
    logits = torch.nn.functional.linear(hidden, weight)
    logprobs = token_logprobs(logits, targets, temperature=temperature)
    if not with_entropy:
        return logprobs, None
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        return logprobs, entropy(logits, temperature=temperature)


class _LinearLogprobs(torch.autograd.Function):
    """With z = h W^T / T and p = softmax(z): log p_y = z_y - lse(z), and H = lse(z) - sum p z."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, spread, norms = (torch.zeros(len(hidden), device=hidden.device) for _ in range(3))
        for rows in _chunks(hidden, weight):
            scores = _scores(hidden[rows], weight, temperature)
            highest = scores.amax(-1)
            chosen = scores.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1)
            scores.sub_(highest.unsqueeze(-1))
            weights = scores.exp()
            total = weights.sum(-1)
            norms[rows] = highest + total.log()
            logprobs[rows] = chosen - norms[rows]
            if with_entropy:
                mean = torch.bmm(weights.unsqueeze(1), scores.unsqueeze(2)).flatten() / total
                spread[rows] = total.log() - mean
            del scores, weights
        ctx.save_for_backward(hidden, weight, targets, norms, spread)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """d log p_y / dz = 1_y - p and dH / dz = -p (log p + H), summed over chunks into dW."""
        hidden, weight, targets, norms, spread = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        wanted_hidden, wanted_weight = ctx.needs_input_grad[:2]
        for_hidden = torch.empty_like(hidden) if wanted_hidden else None
        for_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted_weight else None
        for rows in _chunks(hidden, weight):
            change = _scores(hidden[rows], weight, ctx.temperature).sub_(norms[rows].unsqueeze(-1))  # log p
            factor = torch.zeros_like(norms[rows]) if of_logprobs is None else of_logprobs[rows]
            if of_entropy is None:
                change = change.exp_().mul_(-factor.unsqueeze(-1))
            else:
                share = change.exp()
                change.add_(spread[rows].unsqueeze(-1)).mul_(of_entropy[rows].unsqueeze(-1))
                change.add_(factor.unsqueeze(-1)).mul_(share).neg_()
                del share
            change.scatter_add_(-1, targets[rows].unsqueeze(-1), factor.unsqueeze(-1))
            change = change.div_(ctx.temperature).to(hidden.dtype)
            if for_hidden is not None:
                for_hidden[rows] = change @ weight
            if for_weight is not None:
                _add_product(for_weight, change, hidden[rows])
        return for_hidden, None if for_weight is None else for_weight.to(weight.dtype), None, None, None


def _scores(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """(C, V) float32 logits over the temperature, in memory of their own."""
    scores = (hidden @ weight.T).float()
    return scores if temperature == 1.0 else scores.div_(temperature)


def _add_product(total: Tensor, change: Tensor, hidden: Tensor) -> None:
    """total += change^T hidden, in float32."""
    if change.dtype == torch.float32:
        total.addmm_(change.T, hidden)
    else:
        total += change.T @ hidden


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Rows of `hidden` that are done together."""
    size = max(logits_at_a_time(hidden.device) // len(weight), 1)
    return [slice(start, start + size) for start in range(0, len(hidden), size)]
