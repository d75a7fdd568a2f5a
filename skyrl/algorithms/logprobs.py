"""Log-probabilities of given tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the given tokens, in nats, computed in float32.

    Shapes: `logits` (N, V), `token_ids` (N,) int64, the result (N,) float32. `temperature` must be above 0.
    """
    tempered = logits.float() / temperature
    return tempered.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - tempered.logsumexp(-1)


def entropy(logits: Tensor, *, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats. Shapes: `logits` (N, V), the result (N,) float32."""
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)
