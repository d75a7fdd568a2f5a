"""What a model says about the tokens of a batch, as padded rows or packed into one row: log-probabilities, values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skyrl.algorithms.logprobs import entropy, token_logprobs
from skyrl.batch import TrainingBatch
from skyrl.errors import ModelError

Reading = Callable[[Any, TrainingBatch], tuple[Tensor, dict[str, Tensor]]]
"""What a role asks of its model: (B, L) with gradient, 0 where `loss_mask` is false, and by name numbers for each
selected token that are worth logging.
"""


def sampled_logprobs(model: Any, batch: TrainingBatch, *, temperature: float, pack: bool) -> tuple[Tensor, Tensor]:
    """Log-probability, and entropy of the distribution it was drawn from, of every token that `loss_mask` selects.

    `model` is a transformers causal language model; `pack` joins the rows into one, without padding, each row
    attending to itself alone. Shapes: both results (B, L) float32 in nats, 0 where `loss_mask` is false; only the
    first has a gradient.
    """
    logits = _packed_logits(model, batch) if pack else _padded_logits(model, batch)
    targets = batch.input_ids[batch.loss_mask]
    shape, device = batch.input_ids.shape, batch.input_ids.device
    values = torch.zeros(shape, device=device)
    entropies = torch.zeros(shape, device=device)
    values = values.masked_scatter(batch.loss_mask, token_logprobs(logits, targets, temperature=temperature))
    entropies = entropies.masked_scatter(batch.loss_mask, entropy(logits, temperature=temperature))
    return values, entropies


def read_logprobs(
    model: Any, batch: TrainingBatch, *, temperature: float, pack: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy's `Reading`: log-probabilities, and for each selected token the entropy and the distance, in nats, from
    what the engine said.
    """
    logprobs, entropies = sampled_logprobs(model, batch, temperature=temperature, pack=pack)
    distance = (logprobs.detach() - batch.rollout_logprobs).abs()
    return logprobs, {
        "policy_entropy": entropies[batch.loss_mask],
        "rollout_train_logprobs_abs_diff": distance[batch.loss_mask],
    }


def read_values(model: Any, batch: TrainingBatch, *, pack: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A critic's `Reading`: the value of the state in which each selected token was sampled, the token excluded.

    `model` has one logit. Shape (B, L) float32, 0 where `loss_mask` is false; with gradient.
    """
    logits = _packed_logits(model, batch) if pack else _padded_logits(model, batch)
    values = torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)
    values = values.masked_scatter(batch.loss_mask, logits.float().squeeze(-1))
    return values, {"critic_values": values.detach()[batch.loss_mask]}


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
