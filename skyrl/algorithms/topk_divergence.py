"""Divergence of a student's next tokens from a teacher's over a few tokens of each position: the likeliest ones.

Log-probabilities (N, K) at given tokens are all that is compared, so that a teacher may be on another machine. Those of
the student come from `target_logprobs`, without a table of tokens x vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal

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
    logs, wanted = (torch.where(present, each.float(), _NOTHING) for each in (logprobs, teacher_logprobs.detach()))
    clamped = torch.zeros(len(ids), device=ids.device)
    if tail:
        logs, wanted = _with_tail(logs), _with_tail(wanted)
    if min_logprob is not None:
        low = present & (logs[:, : ids.shape[1]].detach() < min_logprob)
        clamped = low.sum(-1) / present.sum(-1).clamp(min=1)
        logs, wanted = (torch.where(each == _NOTHING, each, each.clamp(min=min_logprob)) for each in (logs, wanted))
    return _divergence(logs, wanted, beta), clamped


def compared_tokens(
    likeliest: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], how: Literal["intersection", "union"]
) -> tuple[Tensor, Tensor]:
    """Ids (N, K) int64 of the tokens that are in both tables of ids, or in either, and the teacher's log-probabilities
    of them; `ABSENT` where a position has fewer. Both arguments are ids (N, k) and the teacher's log-probabilities.
    """
    (ids, logprobs), (other_ids, other_logprobs) = likeliest, others
    if how == "union":
        double = _in_other(other_ids, ids)
        return torch.cat([ids, other_ids.masked_fill(double, ABSENT)], -1), torch.cat([logprobs, other_logprobs], -1)
    return ids.masked_fill(~_in_other(ids, other_ids), ABSENT), logprobs


def _in_other(ids: Tensor, others: Tensor) -> Tensor:
    """(N, k) bool: whether each id is among the other ids of its position. Few positions at a time, for memory."""
    size = max(1, 2**24 // max(1, ids.shape[1] * others.shape[1]))
    pairs = zip(ids.split(size), others.split(size), strict=True)
    return torch.cat([(one[:, :, None] == other[:, None, :]).any(-1) for one, other in pairs])


def _with_tail(logs: Tensor) -> Tensor:
    """(N, K) -> (N, K + 1): log-probabilities, and that of all other tokens together."""
    rest = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_TAIL)
    return torch.cat([logs, rest.log()], dim=-1)


def _divergence(logs: Tensor, wanted: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return (wanted.exp() * (wanted - logs)).sum(-1)
    if beta == 1:
        return (logs.exp() * (logs - wanted)).sum(-1)
    mixture = torch.logaddexp(logs + math.log1p(-beta), wanted + math.log(beta))
    to_student = (logs.exp() * (logs - mixture)).sum(-1)
    return (1 - beta) * to_student + beta * (wanted.exp() * (wanted - mixture)).sum(-1)
