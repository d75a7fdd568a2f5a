"""Log-probabilities of given tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float | Tensor) -> Tensor:
    """log softmax(logits / temperature) at the given tokens, in nats, computed in float32.

    Shapes: `logits` (N, V), `token_ids` (N,) int64, the result (N,) float32. `temperature`, one for all or (N, 1), must
    be above 0. The largest logit is subtracted first, so that the size of the logits costs no precision.
    """
    shifted = logits.float() - logits.detach().amax(-1, keepdim=True).float()
    if isinstance(temperature, Tensor) or temperature != 1.0:
        shifted = shifted.div_(temperature)  # in place: a table of logits is large
    return shifted.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - shifted.exp().sum(-1).log()


def entropy(logits: Tensor, *, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats. Shapes: `logits` (N, V), the result (N,) float32."""
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)
