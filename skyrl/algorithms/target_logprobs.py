"""Log-probabilities of any targets at each position, straight from hidden states, an output matrix and low-rank updates
of it, without a table of positions x vocabulary.

`linear_logprobs` has one target for each position and a matrix that learns. Here each position may have several
targets, and the matrix may be changed by another adapter in each stretch of positions. `likeliest` finds targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl.algorithms.linear_logprobs import VocabularyPart, kept_bytes, scores_of, token_chunks
from skyrl.algorithms.stretch_updates import StretchUpdate, UpdateContext, add_product, gradient_anchor


def target_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    updates: Sequence[StretchUpdate] = (),
    *,
    temperature: float = 1.0,
) -> Tensor:
    """log softmax(hidden weight^T / temperature) at the targets, in nats; `updates` change the product in stretches of
    positions.

    Shapes: `hidden` (N, H), `weight` (V, H), `targets` (N, K) int64, the result (N, K) float32. Softmax is computed in
    float32 whatever the type. The rows of `weight` may be distributed over ranks that have the same other arguments,
    without `updates`; all of them get the result.
    """
    own, part = VocabularyPart.split(weight)
    apply: Any = _TargetLogprobs.apply
    result: Tensor = apply(hidden, own, targets, gradient_anchor(), tuple(updates), temperature, part)
    return result


@torch.no_grad()
def likeliest(
    hidden: Tensor, weight: Tensor, count: int, others: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` likeliest tokens at each position, the likeliest first, and their log-probabilities: (N, count) int64
    and float32; then the log-probabilities (N, K) of the tokens `others` (N, K). The other arguments are those of
    `target_logprobs`. Raises ValueError for more tokens than the vocabulary has.
    """
    if count > len(weight):
        raise ValueError(f"the {count} likeliest of {len(weight)} tokens")
    own, part = VocabularyPart.split(weight)
    ids = torch.empty(len(hidden), count, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), count, device=hidden.device)
    of_others = torch.empty(others.shape, device=hidden.device)
    for rows in token_chunks(hidden, part.largest or len(own)):
        scores = scores_of(hidden[rows], own, temperature)
        norms = _norms(scores, part)
        missing = max(0, count - scores.shape[1])
        best = torch.nn.functional.pad(scores, (0, missing), value=-math.inf).topk(count)
        candidates, numbers = part.gather(best.values), part.gather(best.indices + part.first)
        kept = candidates.topk(count)
        ids[rows], logprobs[rows] = numbers.gather(-1, kept.indices), kept.values - norms
        of_others[rows] = part.reduce(part.chosen(scores, others[rows])) - norms
    return ids, logprobs, of_others


def _norms(scores: Tensor, part: VocabularyPart) -> Tensor:
    """(C, 1): log of the sum of exp(scores) over the tokens of all ranks."""
    if part.group is None:
        return scores.logsumexp(-1, keepdim=True)
    highest = part.reduce(scores.amax(-1, keepdim=True), dist.ReduceOp.MAX)
    return highest + part.reduce((scores - highest).exp_().sum(-1, keepdim=True)).log()


class _Context(UpdateContext):
    temperature: float
    part: VocabularyPart
    chunks: list[slice]
    cached_scores: Tensor | None
    """All logits, if they are few."""


class _TargetLogprobs(torch.autograd.Function):
    """With z = h W^T: log p_y = z_y - lse(z), and dz = sum_k g_k (1_{y_k} - p)."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        anchor: Tensor | None,
        updates: tuple[StretchUpdate, ...],
        temperature: float,
        part: VocabularyPart,
    ) -> Tensor:
        result = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        norms = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        learns = anchor is not None
        tokens = part.largest or len(weight)
        kept = learns and len(hidden) * tokens * 4 <= kept_bytes(hidden.device)
        ctx.chunks = [slice(0, len(hidden))] if kept else token_chunks(hidden, tokens)
        ctx.cached_scores = None
        for rows in ctx.chunks:
            scores, _ = _scores(hidden, weight, updates, rows, temperature)
            norms[rows] = _norms(scores, part)
            target_scores = part.reduce(part.chosen(scores, targets[rows]))
            result[rows] = target_scores - norms[rows]
            ctx.cached_scores = scores if kept else None
        ctx.save_for_backward(hidden, weight, targets, norms)
        ctx.updates, ctx.temperature, ctx.part = updates, temperature, part
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, of_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, norms = ctx.saved_tensors
        for_hidden = torch.empty_like(hidden)
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in ctx.chunks:
            factors = of_logprobs[rows]
            scores, inner = _scores(hidden, weight, ctx.updates, rows, ctx.temperature, ctx.cached_scores)
            change = scores.sub_(norms[rows]).exp_().mul_(-factors.sum(-1, keepdim=True))
            ctx.part.add_at(change, targets[rows], factors)
            if ctx.temperature != 1.0:
                change.div_(ctx.temperature)
            errors = change.to(hidden.dtype)
            for_rows = for_hidden[rows]
            torch.mm(errors, weight, out=for_rows)
            if for_weight is not None:
                add_product(for_weight, errors.T, hidden[rows], 1.0)
            for update, product in inner:
                update.add_gradients(errors, hidden[rows], product, for_rows)
        ctx.cached_scores = None
        ctx.part.reduce(for_hidden)
        of_weight = None if for_weight is None else for_weight.to(weight.dtype)
        return for_hidden if ctx.needs_input_grad[0] else None, of_weight, *[None] * 5


def _scores(
    hidden: Tensor,
    weight: Tensor,
    updates: Sequence[StretchUpdate],
    rows: slice,
    temperature: float,
    kept: Tensor | None = None,
) -> tuple[Tensor, list[tuple[StretchUpdate, Tensor]]]:
    """(C, V) float32 logits of these rows, and the updates in them with x A^T; `kept` are the logits, if kept."""
    own = hidden[rows]
    inside = [element for element in (update.within(rows) for update in updates) if element is not None]
    if kept is not None:
        return kept, [(entry, own[entry.start : entry.stop] @ entry.a.T) for entry in inside]
    scores = (own @ weight.T).float()
    added = [(item, item.add(scores, own)) for item in inside]
    return scores if temperature == 1.0 else scores.div_(temperature), added
