"""Divergence of a student's next tokens from a teacher's, straight from the hidden states and output matrices of both,
without a table of tokens x vocabulary.

As in `linear_logprobs.py`, tables exist for a few hundred tokens at a time, in forward and again in backward, which
computes them anew; what is kept for backward is three numbers per token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from skyrl.algorithms.linear_logprobs import VocabularyPart, add_product, cache_blocks, scores_of, token_chunks
from skyrl.algorithms.shapes import expect_same_shape


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float,
    temperature: float,
) -> Tensor:
    """Generalised Jensen-Shannon divergence (N,) float32, in nats, of the student's distributions p = softmax(hidden
    weight^T / temperature) from the teacher's q, over the whole vocabulary (GKD, arXiv:2306.13649, eq. 1).

    `beta` 0 is the forward KL(q || p), 1 the reverse KL(p || q). Between them, with the mixture m = (1 - beta) p + beta
    q, it is beta KL(q || m) + (1 - beta) KL(p || m). Only `hidden` and `weight` get a gradient.

    Shapes: `hidden` (N, H), `weight` (V, H), `teacher_hidden` (N, H_t), `teacher_weight` (V_t, H_t). Both vocabularies
    number the same tokens alike; of matrices padded to different sizes, the rows that both have count. The rows of
    `weight` may be distributed over ranks that have the same other arguments; all of them get the result. Raises
    ValueError unless there is one teacher state for each state of the student.
    """
    expect_same_shape(hidden=hidden[:, 0], teacher_hidden=teacher_hidden[:, 0])
    own, part = VocabularyPart.split(weight)
    shared = min(len(weight), len(teacher_weight))
    teacher_rows = teacher_weight[part.first : min(part.first + len(own), shared)]
    apply: Any = _LinearDivergence.apply
    divergence: Tensor = apply(hidden, own[: len(teacher_rows)], teacher_hidden, teacher_rows, beta, temperature, part)
    return divergence


class _Saved(FunctionCtx):
    """A forward pass, as backward finds it."""

    beta: float
    temperature: float
    part: VocabularyPart
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _LinearDivergence(torch.autograd.Function):
    """With z the student's scores: dKL(q || p) / dz = p - q. For the other divergences D = sum p u + (terms of q whose
    gradients cancel), so that dD / dz = p (u - sum p u), with u = log p - log q for the reverse KL, and u = (1 - beta)
    (log p - log m) between the two.
    """

    @staticmethod
    def forward(
        ctx: _Saved,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        beta: float,
        temperature: float,
        part: VocabularyPart,
    ) -> Tensor:
        divergence, means, norms, teacher_norms = torch.zeros(4, len(hidden), device=hidden.device).unbind()
        for rows in token_chunks(hidden, part.largest or len(weight)):
            scores, norms[rows] = _scored(hidden[rows], weight, temperature, part)
            teacher_scores, teacher_norms[rows] = _scored(teacher_hidden[rows], teacher_weight, temperature, part)
            terms = torch.empty(2, len(scores), device=scores.device)
            for few in cache_blocks(scores):
                logs = scores[few].sub_(norms[rows][few, None])
                terms[0, few], terms[1, few] = _terms(
                    logs, teacher_scores[few].sub_(teacher_norms[rows][few, None]), beta
                )
            divergence[rows], means[rows] = part.reduce(terms)
            del scores, teacher_scores
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, means, norms, teacher_norms)
        ctx.beta, ctx.temperature, ctx.part = beta, temperature, part
        return divergence

    @staticmethod
    def backward(ctx: _Saved, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, means, norms, teacher_norms = (
            saved.detach() for saved in ctx.saved_tensors
        )
        [factor] = gradients
        needs_hidden_grad, needs_weight_grad = ctx.needs_input_grad[:2]
        for_hidden = torch.empty_like(hidden) if needs_hidden_grad else None
        for_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight_grad else None
        for rows in token_chunks(hidden, ctx.part.largest or len(weight)):
            scores = scores_of(hidden[rows], weight, ctx.temperature)
            teacher_scores = scores_of(teacher_hidden[rows], teacher_weight, ctx.temperature)
            for few in cache_blocks(scores):
                logs = scores[few].sub_(norms[rows][few, None])
                slope = _change(
                    logs, teacher_scores[few].sub_(teacher_norms[rows][few, None]), means[rows][few], ctx.beta
                )
                torch.mul(slope, factor[rows][few, None] / ctx.temperature, out=scores[few])
            change = scores.to(hidden.dtype)
            if for_hidden is not None:
                for_hidden[rows] = change @ weight
            if for_weight is not None:
                add_product(for_weight, change, hidden[rows])
            del scores, teacher_scores, change
        if for_hidden is not None:
            ctx.part.reduce(for_hidden)
        return for_hidden, None if for_weight is None else for_weight.to(weight.dtype), *[None] * 5


def _scored(hidden: Tensor, weight: Tensor, temperature: float, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """(C, V) scores, and (C,) their log sum exp."""
    scores = scores_of(hidden, weight, temperature)
    highest = part.reduce(scores.amax(-1), dist.ReduceOp.MAX)
    total = torch.empty_like(highest)
    for few in cache_blocks(scores):
        total[few] = (scores[few] - highest[few, None]).exp_().sum(-1)
    return scores, highest + part.reduce(total).log()


def _terms(logs: Tensor, teacher_logs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(C,): the divergence, and the mean of u under p, from log p and log q (C, V) of the tokens of one rank."""
    if beta == 0:
        return _mean(teacher_logs, teacher_logs - logs), torch.zeros_like(logs[:, 0])
    if beta == 1:
        divergence = _mean(logs, logs - teacher_logs)
        return divergence, divergence
    mixture = _mixture(logs, teacher_logs, beta)
    student = (1 - beta) * _mean(logs, logs - mixture)
    return student + beta * _mean(teacher_logs, teacher_logs - mixture), student


def _change(logs: Tensor, teacher_logs: Tensor, means: Tensor, beta: float) -> Tensor:
    """(C, V): derivative of the divergence by the student's scores."""
    if beta == 0:
        return logs.exp() - teacher_logs.exp()
    slope = logs - teacher_logs if beta == 1 else (logs - _mixture(logs, teacher_logs, beta)).mul_(1 - beta)
    return slope.sub_(means.unsqueeze(-1)).mul_(logs.exp())


def _mixture(logs: Tensor, teacher_logs: Tensor, beta: float) -> Tensor:
    """(C, V): log((1 - beta) p + beta q)."""
    return torch.logaddexp(logs + math.log1p(-beta), teacher_logs + math.log(beta))


def _mean(logs: Tensor, values: Tensor) -> Tensor:
    """(C,): sum of exp(logs) x values over the tokens. A matrix product would add them up one by one, and be off by a
    thousandth at a vocabulary of 150,000.
    """
    return logs.exp().mul_(values).sum(-1)
