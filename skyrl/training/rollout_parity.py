"""The samples that a run trains on, as proof that each engine computes with the learner's weights.

The first update after a batch was sampled scores every token with the weights that drew it, so that a comparison costs
nothing. Later updates of the step score with changed weights, and rows that older weights drew cannot be compared.
"""

from __future__ import annotations

from collections import defaultdict

from skyrl.batch import TrainingBatch
from skyrl.learners.forward import PARITY
from skyrl.learners.workers.learning_worker import Objective
from skyrl.training.describe import Metrics
from skyrl.training.middleware import Call
from skyrl.weight_sync.canary import ENOUGH_TOKENS, refuse_mean


class RolloutParity:
    """Compares each engine's log-probabilities of its samples with the learner's, once it has enough tokens."""

    def __init__(self, bound: float | None) -> None:
        """`bound` is the largest mean absolute difference, in nats, that is attributed to rounding; None compares
        nothing, for runs whose learner does not score samples as engines draw them.
        """
        self._bound = bound
        self._version, self._is_fresh = 0, False
        self._nats: defaultdict[int, float] = defaultdict(float)
        self._tokens: defaultdict[int, float] = defaultdict(float)

    def sampled(self, groups: object, version: int) -> None:
        """Listener for `Rollouts.next_batch`."""
        self._version, self._is_fresh = version, True

    def around(
        self, forward_backward: Call[[TrainingBatch, Objective], Metrics]
    ) -> Call[[TrainingBatch, Objective], Metrics]:
        """`forward_backward`, whose results are read and left out of its metrics. Raises `WeightSyncError`, which names
        the engine, if the mean of one exceeds the bound.
        """

        async def passed(batch: TrainingBatch, objective: Objective) -> Metrics:
            metrics = await forward_backward(batch, objective)
            sums = {name.removeprefix(PARITY): value for name, value in metrics.items() if name.startswith(PARITY)}
            if self._is_fresh and sums:
                self._is_fresh = False
                self._add(sums)
            return {name: value for name, value in metrics.items() if not name.startswith(PARITY)}

        return passed

    def _add(self, sums: Metrics) -> None:
        for name, value in sums.items():
            number, _, kind = name.partition("/")
            (self._nats if kind == "nats" else self._tokens)[int(number)] += value
        for engine, tokens in list(self._tokens.items()):
            if tokens >= ENOUGH_TOKENS:
                nats = self._nats.pop(engine) / self._tokens.pop(engine)
                if self._bound is not None:
                    refuse_mean(nats, int(tokens), f"engine {engine}", self._version, self._bound)
