"""Evaluation of supervised models on rows that they are not trained on."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.learners.workers.objectives import pair_margins, pair_scores, preference_loss

MOST_PERPLEXITY = math.log(1e30)
"""Nats above which the perplexity is not reported, because the number would be meaningless."""


class RowScorer(Protocol):
    """A model that gives a number for each selected token."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) scores of the selected tokens."""


Sums = dict[str, tuple[float, float]]
"""Sums by name, each with the number of its terms: name -> (sum, count)."""

Measure = Callable[[Tensor, TrainingBatch], Sums]
"""Function from a batch's scores to sums."""


Completion = Callable[[TrainingBatch], Awaitable[TrainingBatch]]
"""Function that adds to a batch what other models compute, such as a reference."""


async def unchanged(batch: TrainingBatch) -> TrainingBatch:
    """The `Completion` that adds nothing."""
    return batch


class SupervisedEvaluation:
    """Evaluates a model on several sets of rows, separately and together."""

    def __init__(
        self,
        sets: Mapping[str, Sequence[Any]],
        collate: Callable[[Sequence[Any]], TrainingBatch],
        measure: Measure,
        *,
        batch_size: int,
        complete: Completion = unchanged,
    ) -> None:
        """`batch_size` is in rows of the evaluation sets."""
        self._sets, self._collate, self._measure, self._batch_size = sets, collate, measure, batch_size
        self._complete = complete

    async def run(self, model: RowScorer) -> dict[str, float]:
        """Metrics `eval/<set>/loss`, ... of each set, and `eval/all/...` of all together."""
        metrics: dict[str, float] = {}
        total: Sums = {}
        for name, rows in self._sets.items():
            own: Sums = {}
            for start in range(0, len(rows), self._batch_size):
                batch = await self._complete(self._collate(rows[start : start + self._batch_size]))
                own = _added(own, self._measure(await model.score(batch), batch))
            total = _added(total, own)
            metrics |= _means(f"eval/{name}", own)
        return metrics | _means("eval/all", total)


def likelihood(logprobs: Tensor, batch: TrainingBatch) -> Sums:
    """Negative log-likelihood in nats and number of the learned tokens of a batch, both weighted per token. `logprobs`
    (B, L).
    """
    weights = batch.loss_mask if batch.token_weights is None else batch.token_weights
    nats = torch.where(batch.loss_mask, -logprobs, 0.0).double() * weights
    return {"loss": (nats.sum().item(), float(weights.double().sum()))}


def preferences(values: Tensor, batch: TrainingBatch) -> Sums:
    """The loss of the pairs of a batch, and the number of pairs in the right order. `values` (B, L)."""
    chosen, rejected = pair_scores(torch.where(batch.loss_mask, values, 0.0))
    pairs = float(len(chosen))
    return {
        "loss": (preference_loss(chosen, rejected, pair_margins(batch)).double().sum().item(), pairs),
        "accuracy": ((chosen > rejected).double().sum().item(), pairs),
        "margin": ((chosen - rejected).double().sum().item(), pairs),
    }


def _added(one: Sums, other: Sums) -> Sums:
    result: Sums = {}
    for name in one | other:
        (nats, count), (more, others) = one.get(name, (0.0, 0.0)), other.get(name, (0.0, 0.0))
        result[name] = (nats + more, count + others)
    return result


def _means(prefix: str, sums: Sums) -> dict[str, float]:
    means = {f"{prefix}/{name}": total / count for name, (total, count) in sums.items() if count}
    if "accuracy" not in sums and f"{prefix}/loss" in means:
        means[f"{prefix}/perplexity"] = math.exp(min(means[f"{prefix}/loss"], MOST_PERPLEXITY))
    return means
