"""Divergence of a student's next tokens from a teacher's over a few tokens of each position: the likeliest ones.

Log-probabilities (N, K) at given tokens are all that is compared, so that a teacher may be on another machine. Those of
the student come from `target_logprobs`, without a table of tokens x vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skyrl.algorithms.shapes import expect_same_shape

ABSENT = -1
"""Token id of an entry that does not count, where a position has fewer tokens than others."""

_NOTHING = -100.0
"""Log-probability that stands for an absent token in both distributions, so that it adds nothing."""

_SMALLEST_TAIL = 2.0**-23
"""Probability of all other tokens if those compared have all of it, up to rounding."""


def topk_divergence(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    ids: Tensor,
    *,
    beta: float,
    tail: bool,
    min_logprob: float | None,
) -> tuple[Tensor, Tensor]:
    """Generalised Jensen-Shannon divergence (N,) float32, in nats, of the student from the teacher over the tokens
    `ids`, and the share (N,) of them whose log-probability under the student was raised to `min_logprob`.

    With p and q the probabilities under student and teacher, `beta` 0 is the sum of q (log q - log p), 1 that of p (log
    p - log q), and between them is as in `linear_divergence`. With `tail`, all other tokens count as one more, so that
    the result is a divergence, 0 and without gradient where p = q (TA-OPD, arXiv:2608.14728). Without it, beta 0 is
    verl's `forward_kl_topk`; its gradient also moves probability from the other tokens to these. Log-probabilities
    below `min_logprob` are raised to it, and those of the student then have no gradient.

    Shapes: (N, K), log-probabilities in nats and over the whole vocabulary; entries with id `ABSENT` do not count. Only
    `logprobs` gets a gradient. Raises ValueError for shapes that differ.
    """
    expect_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs, ids=ids)
    present = ids != ABSENT
    logs, teacher_logs = (
        torch.where(present, entry.float(), _NOTHING) for entry in (logprobs, teacher_logprobs.detach())
    )
    clamped = torch.zeros(len(ids), device=ids.device)
    if tail:
        logs, teacher_logs = _append_tail(logs), _append_tail(teacher_logs)
    if min_logprob is not None:
        low = present & (logs[:, : ids.shape[1]].detach() < min_logprob)
        clamped = low.sum(-1) / present.sum(-1).clamp(min=1)
        logs, teacher_logs = (
            torch.where(item == _NOTHING, item, item.clamp(min=min_logprob)) for item in (logs, teacher_logs)
        )
    return _divergence(logs, teacher_logs, beta), clamped


def tokens_of_both(ids: Tensor, others: Tensor) -> Tensor:
    """(N, k) int64: the ids that are also among the others (N, j) of their position, `ABSENT` in place of the rest."""
    return ids.masked_fill(~_contained_in(ids, others), ABSENT)


def union_of_tokens(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids (N, k + j) int64 of the tokens in either table, once each, and their log-probabilities; both arguments are
    ids and the teacher's log-probabilities of them, (N, k) and (N, j).
    """
    (ids, logprobs), (more, more_logprobs) = one, other
    added = more.masked_fill(_contained_in(more, ids), ABSENT)
    return torch.cat([ids, added], -1), torch.cat([logprobs, more_logprobs], -1)


def _contained_in(ids: Tensor, others: Tensor) -> Tensor:
    """(N, k) bool: whether each id is among the other ids of its position. Few positions at a time, for memory."""
    size = max(1, 2**24 // max(1, ids.shape[1] * others.shape[1]))
    pairs = zip(ids.split(size), others.split(size), strict=True)
    return torch.cat([(one[:, :, None] == other[:, None, :]).any(-1) for one, other in pairs])


def _append_tail(logs: Tensor) -> Tensor:
    """(N, K) -> (N, K + 1): log-probabilities, and that of all other tokens together."""
    rest = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_TAIL)
    return torch.cat([logs, rest.log()], dim=-1)


def _divergence(logs: Tensor, teacher_logs: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return (teacher_logs.exp() * (teacher_logs - logs)).sum(-1)
    if beta == 1:
        return (logs.exp() * (logs - teacher_logs)).sum(-1)
    mixture = torch.logaddexp(logs + math.log1p(-beta), teacher_logs + math.log(beta))
    to_student = (logs.exp() * (logs - mixture)).sum(-1)
    return (1 - beta) * to_student + beta * (teacher_logs.exp() * (teacher_logs - mixture)).sum(-1)
