"""A learner that is nothing but a model: it streams its weights, scores rows, and can be moved at random."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.models.files.naming import named_weights
from skyrl.models.lora import adapter_alone

R = TypeVar("R")
Weights = Iterator[tuple[str, Tensor]]


class HeldModel:
    """`WeightSource` over a transformers model of this process; `damage` may change what it sends."""

    def __init__(self, model: Any, damage: Callable[[Weights], Weights] = lambda weights: weights) -> None:
        self.model, self.damage = model, damage
        self._generator = torch.Generator().manual_seed(0)

    async def export_weights(
        self,
        consume: Callable[[Weights], R],
        *,
        everywhere: bool = False,
        adapter: bool = False,
        dtype: str | None = None,
    ) -> R:
        return await asyncio.to_thread(consume, self.damage(self._weights(adapter)))

    async def shapes(self, *, adapter: bool = False) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(weight.shape)) for name, weight in self.damage(self._weights(adapter))]

    def _weights(self, adapter: bool) -> Weights:
        return adapter_alone(iter(self.model.state_dict().items())) if adapter else named_weights(self.model)

    async def score(self, batch: TrainingBatch) -> Tensor:
        scores = torch.zeros(batch.input_ids.shape)
        for row, length in enumerate(batch.lengths.tolist()):
            ids = batch.input_ids[row, :length].to(self.model.device)
            with torch.no_grad():
                logprobs = self.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            scores[row, 1:length] = logprobs.gather(1, ids[1:, None])[:, 0]
        return scores * batch.loss_mask

    def update_at_random(self) -> None:
        """As far as an optimizer never would: every weight by a tenth of its spread."""
        with torch.no_grad():
            for weight in self.model.parameters():
                noise = torch.randn(weight.shape, generator=self._generator).to(weight.device)
                weight.add_(noise * 0.1 * weight.std(correction=0).clamp(min=0.1))
