"""What a model says about the tokens of a batch, as padded rows or packed into one row: log-probabilities, values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.logprobs import entropy, token_logprobs
from skyrl.batch import TrainingBatch
from skyrl.errors import ModelError


@attrs.frozen(kw_only=True, eq=False)
class Outputs:
    """What a role's model says of a batch."""

    values: Tensor
    """(B, L) with gradient, 0 where `loss_mask` is false: log-probabilities in nats, or a critic's values."""

    entropy: Tensor | None = None
    """(B, L) in nats, of the distribution that each selected token was drawn from, 0 elsewhere."""

    numbers: dict[str, Tensor] = attrs.field(factory=dict)
    """By name, numbers for each selected token that are worth logging."""


Reading = Callable[[Any, TrainingBatch], Outputs]
"""What a role asks of its model."""


def read_logprobs(
    model: Any, batch: TrainingBatch, *, temperature: float, pack: bool, entropy_gradient: bool = False
) -> Outputs:
    """A policy's `Reading`: log-probability, and entropy of the distribution it was drawn from, of every token that
    `loss_mask` selects, and how far, in nats, it is from what the engine said.

    `model` is a transformers causal language model; `pack` joins the rows into one, without padding, each row
    attending to itself alone. The entropy has a gradient only if that is asked for.
    """
    logits = _packed_logits(model, batch) if pack else _padded_logits(model, batch)
    targets = batch.input_ids[batch.loss_mask]
    found = token_logprobs(logits, targets, temperature=temperature)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        spread = entropy(logits, temperature=temperature)
    distance = (found.detach() - batch.rollout_logprobs[batch.loss_mask]).abs()
    return Outputs(
        values=_in_place(found, batch),
        entropy=_in_place(spread, batch),
        numbers={"policy_entropy": spread.detach(), "rollout_train_logprobs_abs_diff": distance},
    )


def read_values(model: Any, batch: TrainingBatch, *, pack: bool) -> Outputs:
    """A critic's `Reading`: the value of the state in which each selected token was sampled, the token excluded.

    `model` has one logit.
    """
    logits = _packed_logits(model, batch) if pack else _padded_logits(model, batch)
    values = logits.float().squeeze(-1)
    return Outputs(values=_in_place(values, batch), numbers={"critic_values": values.detach()})


def _in_place(found: Tensor, batch: TrainingBatch) -> Tensor:
    """(N,) numbers of the selected tokens, in row order -> (B, L), 0 elsewhere."""
    return torch.zeros(batch.input_ids.shape, device=found.device).masked_scatter(batch.loss_mask, found)


def _padded_logits(model: Any, batch: TrainingBatch) -> Tensor:
    """(N, V) logits that predict the selected tokens, in row order.

    Padding stands on the right, where causal attention keeps it out of every real token, so no mask is needed. A batch
    without selected tokens goes through the model all the same: other ranks wait for this one in every layer.
    """
    used = batch.loss_mask.any(0)
    first = int(used.int().argmax()) if used.any() else len(used)  # no column before it is ever selected
    columns = torch.arange(first - 1, batch.input_ids.shape[1] - 1, device=batch.input_ids.device)
    logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=columns).logits
    selected: Tensor = logits[batch.loss_mask[:, first:]]
    return selected


def _packed_logits(model: Any, batch: TrainingBatch) -> Tensor:
    """As `_padded_logits`, from one row in which positions start again with each sequence.

    transformers isolates packed sequences only when there is no attention mask and no cache: with either, sequences see
    each other and nothing warns.
    """
    columns = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    real = columns < batch.lengths.unsqueeze(1)
    positions = columns.expand_as(batch.input_ids)[real]
    predicts = torch.zeros_like(batch.loss_mask)
    predicts[:, :-1] = batch.loss_mask[:, 1:]  # a token is predicted at the position before it
    keep = predicts[real].nonzero().squeeze(-1)
    logits = model(
        input_ids=batch.input_ids[real].unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=keep,
    ).logits
    selected: Tensor = logits[0]
    return selected


@torch.no_grad()
def probe_forward(model: Any, *, pack: bool, device: torch.device) -> None:
    """See for a few tokens that the model looks back only, and that packed rows do not see each other.

    Neither is announced by a model, and both fail silently. Raises `ModelError`.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(1, 15, device=device) * 7919 % vocabulary
    alone = _logits(model, ids[5:])
    if _differ(_logits(model, ids[5:-2]), alone[:-2]):
        raise ModelError("this model's output at a token depends on later tokens: it is not a causal language model")
    if not pack:
        return
    positions = torch.cat([torch.arange(5), torch.arange(9)]).to(device)
    packed = model(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False).logits[0]
    if _differ(packed[5:], alone):
        raise ModelError(
            "rows of this model see each other when they are packed into one: set trainer.use_sample_packing = false"
        )


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    return logits


def _differ(one: Tensor, other: Tensor) -> bool:
    """By more than rounding, which is small beside the spread of the logits, and less small in 16 bits."""
    bound = 1e-2 if one.dtype == torch.float32 else 0.25
    return bool((one.float() - other.float()).abs().max() > bound * other.float().std().clamp(min=1e-6))
