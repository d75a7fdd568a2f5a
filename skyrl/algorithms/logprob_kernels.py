"""Triton kernels for log-probabilities and entropies from a table of logits, and for the gradient of the logits.

Each reads the table once, in its own type, and stores nothing of its size: the forward kernel keeps a running maximum
and running sums for each token (online softmax, arXiv:1805.02867), and the backward kernel overwrites the logits with
their gradient. Without them, the same values take about eight passes over a table in float32.

Importing this module needs the package triton, which comes with torch's builds for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Logits of a token that a program reads at a time."""


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log p at the targets, entropy of p in nats, and log of the sum of exp(logits / temperature), where p is the
    softmax of logits / temperature.

    Shapes: `logits` (N, V) of any floating-point type, with adjacent columns; `targets` (N,) int64; all results (N,)
    float32.
    """
    tokens, vocabulary = logits.shape
    logprobs, spread, norms = torch.empty(3, tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        _statistics[(tokens,)](
            logits,
            targets,
            logprobs,
            spread,
            norms,
            logits.stride(0),
            vocabulary,
            1.0 / temperature,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return logprobs, spread, norms


def overwrite_with_gradient(
    logits: Tensor,
    targets: Tensor,
    norms: Tensor,
    spread: Tensor,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    temperature: float,
) -> None:
    """Replace the logits (N, V) by their gradient, given those of log-probabilities and entropies (N,); None is 0.

    With z = logits / temperature: d log p_y / dz = 1_y - p and dH / dz = -p (log p + H).
    """
    tokens, vocabulary = logits.shape
    if tokens:
        factors = torch.zeros_like(norms) if of_logprobs is None else of_logprobs.contiguous()
        slopes = norms if of_entropy is None else of_entropy.contiguous()
        _gradient[(tokens,)](
            logits,
            targets,
            norms,
            spread,
            factors,
            slopes,
            logits.stride(0),
            vocabulary,
            1.0 / temperature,
            HAS_SLOPE=of_entropy is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )


@triton.jit
def _statistics(logits, targets, logprobs, spread, norms, stride, vocabulary, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    highest = -float("inf")
    total = 0.0  # sum of exp(z - highest)
    weighted = 0.0  # sum of exp(z - highest) (z - highest)
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        scores = tl.load(start + columns, mask=columns < vocabulary, other=-float("inf")).to(tl.float32) * scale
        newest = tl.maximum(highest, tl.max(scores, 0))
        distance = scores - newest
        weights = tl.exp(distance)
        moved = tl.where(highest == -float("inf"), 0.0, highest - newest)
        shrink = tl.where(highest == -float("inf"), 0.0, tl.exp(moved))
        weighted = shrink * (weighted + total * moved) + tl.sum(weights * tl.where(weights > 0.0, distance, 0.0), 0)
        total = shrink * total + tl.sum(weights, 0)
        highest = newest
    target = tl.load(targets + row)
    chosen = tl.load(start + target).to(tl.float32) * scale
    tl.store(logprobs + row, chosen - highest - tl.log(total))
    tl.store(spread + row, tl.log(total) - weighted / total)
    tl.store(norms + row, highest + tl.log(total))


@triton.jit
def _gradient(
    logits,
    targets,
    norms,
    spread,
    factors,
    slopes,
    stride,
    vocabulary,
    scale,
    HAS_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target, norm, factor = tl.load(targets + row), tl.load(norms + row), tl.load(factors + row)
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        logs = tl.load(start + columns, mask=inside, other=-float("inf")).to(tl.float32) * scale - norm
        shares = tl.exp(logs)
        change = factor * ((columns == target).to(tl.float32) - shares)
        if HAS_SLOPE:
            surprise = tl.where(shares > 0.0, logs + tl.load(spread + row), 0.0)
            change -= tl.load(slopes + row) * shares * surprise
        tl.store(start + columns, (change * scale).to(logits.dtype.element_ty), mask=inside)
