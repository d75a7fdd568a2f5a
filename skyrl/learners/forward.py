"""A causal language model's log-probabilities of the tokens of a batch, as padded rows or packed into one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl.algorithms.logprobs import entropy, token_logprobs
from skyrl.batch import TrainingBatch
from skyrl.errors import ModelError


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


def _padded_logits(model: Any, batch: TrainingBatch) -> Tensor:
    """(N, V) logits that predict the selected tokens, in row order.

    Padding stands on the right, where causal attention keeps it out of every real token, so no mask is needed.
    """
    first = int(batch.loss_mask.any(0).int().argmax())  # no column before it is ever selected
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
def probe_forward(model: Any, *, pack: bool) -> None:
    """See for a few tokens that the model looks back only, and that packed rows do not see each other.

    Neither is announced by a model, and both fail silently. Raises `ModelError`.
    """
    vocabulary, device = model.get_input_embeddings().num_embeddings, model.device
    ids = torch.arange(1, 15, device=device) * 7919 % vocabulary
    alone = _logits(model, ids[5:]).float()
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
    """By more than rounding, which is small beside the spread of the logits."""
    return bool((one.float() - other.float()).abs().max() > 1e-2 * other.float().std().clamp(min=1e-6))
