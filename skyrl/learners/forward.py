"""A causal language model's log-probabilities of the tokens of a batch, as padded rows or packed into one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl.algorithms.logprobs import entropy, token_logprobs
from skyrl.batch import TrainingBatch


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
