"""Advantage estimators, which turn the rewards of a batch into an advantage for each token.

An estimator takes a `TrainingBatch` and returns (B, L), 0 where `loss_mask` is false. An estimator with settings,
built in or custom, is a frozen class with `__call__`, whose fields are its settings. The formulas are in
`advantages.py`, one number per answer, and in `returns.py`, one per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.advantages import (
    broadcast_last_advantage,
    length_weighted,
    less_the_greedy_score,
    less_the_group_mean,
)
from skyrl.algorithms.masked import whiten
from skyrl.algorithms.returns import discounted_returns, generalized_advantages
from skyrl.batch import TrainingBatch


class AdvantageEstimator(Protocol):
    """An advantage estimator with its settings."""

    def __call__(self, batch: TrainingBatch, /) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""


@attrs.frozen
class Compared:
    """Compares the score of each answer with the scores of others, by a formula of `advantages.py`."""

    compare: Callable[[Tensor, Tensor], Tensor]
    """Maps (scores, groups), each (N,), to the advantage of each answer, (N,)."""

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        return broadcast_to_tokens(batch, self.compare)


@attrs.frozen(kw_only=True)
class OPO:
    """`"opo"`: scores minus the length-weighted mean of their group; see `length_weighted`."""

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        tokens = batch.over_trajectories(batch.loss_mask.sum(1))  # a trajectory is as long as all its turns
        compared = tokens if batch.last_step is None else tokens[batch.last_step]
        return broadcast_to_tokens(batch, lambda scores, groups: length_weighted(scores, groups, compared))


@attrs.frozen(kw_only=True)
class ReMax:
    """`"remax"`: scores minus `baselines` of the batch, the scores of greedy answers; see `less_the_greedy_score`."""

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        assert batch.baselines is not None, "remax needs the greedy answers' rewards"
        baselines = batch.baselines if batch.last_step is None else batch.baselines[batch.last_step]
        return broadcast_to_tokens(batch, lambda scores, groups: less_the_greedy_score(scores, baselines))


@attrs.frozen(kw_only=True)
class ReinforcePlusPlus:
    """`"reinforce++"`: `discounted_returns`, whitened over the tokens of the batch (arXiv:2501.03262)."""

    gamma: float
    whitened: bool = True
    """False: plain returns, REINFORCE without a baseline (Williams 1992)."""

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        returns = discounted_returns(batch.rewards, batch.loss_mask, gamma=self.gamma)
        return whiten(returns, batch.loss_mask) if self.whitened else returns


@attrs.frozen(kw_only=True)
class ReinforcePlusPlusBaseline:
    """`"reinforce++-baseline"`: `less_the_group_mean`, then whitened over the tokens of the batch."""

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        return whiten(broadcast_to_tokens(batch, less_the_group_mean), batch.loss_mask)


@attrs.frozen(kw_only=True)
class GAE:
    """`"gae"`: `generalized_advantages`, whitened over the tokens of the batch, which holds the `values`."""

    gamma: float
    lambd: float
    whitened: bool = True

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """(B, L): advantages of the selected tokens, 0 elsewhere."""
        assert batch.values is not None, "gae needs a critic's values"
        advantages, _ = generalized_advantages(
            batch.rewards, batch.values, batch.loss_mask, gamma=self.gamma, lambd=self.lambd
        )
        return whiten(advantages, batch.loss_mask) if self.whitened else advantages


def broadcast_to_tokens(batch: TrainingBatch, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(B, L): every selected token of an answer gets the advantage that `compare(scores, groups)` gives the answer.

    If rows are turns of trajectories, the last turns are compared, by the rewards of their whole trajectories, and
    every turn gets the advantage of the last turn of its trajectory.
    """
    if batch.trajectories is None or batch.last_step is None:
        result = compare(batch.scores, batch.groups)
    else:
        totals, last = batch.over_trajectories(batch.scores), batch.last_step
        result = torch.zeros_like(totals)
        result[last] = compare(totals[last], batch.groups[last])
        result = broadcast_last_advantage(result, batch.trajectories, last)
    return torch.where(batch.loss_mask, result.unsqueeze(1), 0.0)
