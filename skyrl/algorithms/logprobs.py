"""Log-probabilities of given tokens, and entropy, from logits; and single functions of tensors for `torch.compile`.

Each function that is compiled becomes one or two kernels that read the table of tokens x vocabulary once; uncompiled,
its operations read the table several times and store every intermediate result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

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


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `entropy` of one table of logits."""
    return token_logprobs(logits, targets, temperature=temperature), entropy(logits, temperature=temperature)


def logprobs_alone(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """`token_logprobs` of a table of logits."""
    return token_logprobs(logits, targets, temperature=temperature)


def statistics(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p at the targets, entropy of p, and log of the sum of exp(scores), where p is the softmax of `scores` (N, V),
    float32; all others are (N,).
    """
    highest = scores.amax(-1)
    shifted = scores - highest.unsqueeze(-1)
    weights = shifted.exp()
    total = weights.sum(-1)
    chosen = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    spread = total.log() - (weights * shifted).sum(-1) / total
    return chosen - total.log(), spread, highest + total.log()


def change_of_scores(
    scores: Tensor, targets: Tensor, norms: Tensor, spread: Tensor, of_logprobs: Tensor, of_entropy: Tensor
) -> Tensor:
    """(N, V): gradient of the scores, given the gradients of the log-probabilities and of the entropies.

    d log p_y / dz = 1_y - p and dH / dz = -p (log p + H).
    """
    logs = scores - norms.unsqueeze(-1)
    of_each = of_logprobs.unsqueeze(-1) + (logs + spread.unsqueeze(-1)) * of_entropy.unsqueeze(-1)
    return (-logs.exp() * of_each).scatter_add(-1, targets.unsqueeze(-1), of_logprobs.unsqueeze(-1))


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function in `torch.compile`, for any number of tokens; it is compiled on the first call."""
    with _quiet():
        compiled_function: Callable[..., Any] = torch.compile(function, dynamic=True)

    def call(*tensors: object) -> object:
        with _quiet():
            return compiled_function(*tensors)

    return call


@contextmanager
def _quiet() -> Iterator[None]:
    """A block that hides torch's warnings about itself: deprecated names, and gradients that its compiler reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield
