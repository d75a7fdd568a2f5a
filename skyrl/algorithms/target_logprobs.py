"""Log-probabilities of any targets at each position, straight from hidden states, an output matrix and low-rank updates
of it, without a table of positions x vocabulary.

`linear_logprobs` has one target for each position and a matrix that learns. Here each position may have several
targets, and the matrix may be changed by another adapter in each stretch of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl.algorithms.linear_logprobs import kept_bytes, logits_at_a_time
from skyrl.algorithms.stretch_updates import StretchUpdate, UpdateContext, add_product, gradient_anchor


def target_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, updates: Sequence[StretchUpdate] = ()) -> Tensor:
    """log softmax(hidden weight^T) at the targets, in nats; `updates` change the product in stretches of positions.

    Shapes: `hidden` (N, H), `weight` (V, H), `targets` (N, K) int64, the result (N, K) float32. Softmax is computed in
    float32 whatever the type.
    """
    apply: Any = _TargetLogprobs.apply
    result: Tensor = apply(hidden, weight, targets, gradient_anchor(), tuple(updates))
    return result


class _Context(UpdateContext):
    chunks: list[range]
    kept: Tensor | None
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
    ) -> Tensor:
        result = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        norms = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        learns = anchor is not None
        kept = learns and len(hidden) * len(weight) * 4 <= kept_bytes(hidden.device)
        ctx.chunks = [range(len(hidden))] if kept else _chunks(len(hidden), len(weight), hidden.device)
        ctx.kept = None
        for rows in ctx.chunks:
            scores, _ = _scores(hidden, weight, updates, rows)
            norms[rows.start : rows.stop] = scores.logsumexp(-1, keepdim=True)
            found = scores.gather(-1, targets[rows.start : rows.stop])
            result[rows.start : rows.stop] = found - norms[rows.start : rows.stop]
            ctx.kept = scores if kept else None
        ctx.save_for_backward(hidden, weight, targets, norms)
        ctx.updates = updates
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, of_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, norms = ctx.saved_tensors
        for_hidden = torch.empty_like(hidden)
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in ctx.chunks:
            place = slice(rows.start, rows.stop)
            factors = of_logprobs[place]
            scores, inner = _scores(hidden, weight, ctx.updates, rows, ctx.kept)
            change = scores.sub_(norms[place]).exp_().mul_(-factors.sum(-1, keepdim=True))
            change.scatter_add_(-1, targets[place], factors)
            errors = change.to(hidden.dtype)
            for_rows = for_hidden[place]
            torch.mm(errors, weight, out=for_rows)
            if for_weight is not None:
                add_product(for_weight, errors.T, hidden[place], 1.0)
            for update, product in inner:
                update.add_gradients(errors, hidden[place], product, for_rows)
        ctx.kept = None
        of_weight = None if for_weight is None else for_weight.to(weight.dtype)
        return for_hidden if ctx.needs_input_grad[0] else None, of_weight, None, None, None


def _scores(
    hidden: Tensor, weight: Tensor, updates: Sequence[StretchUpdate], rows: range, kept: Tensor | None = None
) -> tuple[Tensor, list[tuple[StretchUpdate, Tensor]]]:
    """(C, V) float32 logits of these rows, and the updates in them with x A^T; `kept` are the logits, if kept."""
    own = hidden[rows.start : rows.stop]
    inside = [each for each in (update.within(rows) for update in updates) if each is not None]
    if kept is not None:
        return kept, [(each, own[each.start : each.stop] @ each.a.T) for each in inside]
    scores = (own @ weight.T).float()
    return scores, [(each, each.add(scores, own)) for each in inside]


def _chunks(positions: int, tokens: int, device: torch.device) -> list[range]:
    """Positions that are computed together, for a vocabulary of `tokens`."""
    size = max(logits_at_a_time(device) // tokens, 1)
    return [range(start, min(start + size, positions)) for start in range(0, positions, size)]
