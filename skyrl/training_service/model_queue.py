"""Requests of models, in the order in which they run.

Requests of one model run by their number, from 0, whatever the order of their arrival; one that is missing holds up
those after it. Different models take turns: the one served longest ago comes first, and if its request is a pass, the
next passes of other models join it, as many as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from attrs import define, field

from skyrl.training_service.backend import AdapterSpec
from skyrl.training_service.store import StoredRequest

Kind = Literal[
    "create", "pass", "step", "save", "save_for_sampler", "save_external", "load", "create_from", "unload", "refused"
]
"""Kind of a request of a model. `refused` stands in the place of one that was too long to be stored."""


@define(kw_only=True)
class QueuedModel:
    """A model, and its requests that are not finished."""

    id: str
    client: str
    session: str
    spec: AdapterSpec | None = None
    next_seq: int = 0
    """Number of the request that runs next. 0 creates the model."""

    waiting: dict[int, StoredRequest] = field(factory=dict)
    """Acknowledged requests that are not finished, by their numbers."""

    served: int = 0
    """Turn in which the model was served last."""

    steps: int = 0
    loss: float | None = None
    """Loss of the last pass, per token."""

    ending: bool = False
    """Whether its session has ended, after which it is unloaded."""

    gap_since: float | None = None
    """Monotonic time at which requests were first found to wait for one that has not arrived."""

    @property
    def ready(self) -> StoredRequest | None:
        """The request that can run now."""
        return self.waiting.get(self.next_seq)

    def seconds_of_gap(self, now: float) -> float:
        """Time for which requests have waited for one that has not arrived; called now and then."""
        if not self.waiting or self.ready:
            self.gap_since = None
            return 0.0
        if self.gap_since is None:
            self.gap_since = now
        return now - self.gap_since


class ModelQueue:
    """All models of the service."""

    def __init__(self, most_pass_tokens: int) -> None:
        self._models: dict[str, QueuedModel] = {}
        self._most_pass_tokens = most_pass_tokens
        self._turn = 0

    def __iter__(self) -> Iterator[QueuedModel]:
        return iter(list(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    def get(self, model_id: str) -> QueuedModel | None:
        """The model, if there is one."""
        return self._models.get(model_id)

    def add(self, model: QueuedModel) -> None:
        """Add a model that takes its turn from now on."""
        model.served = self._turn
        self._models[model.id] = model

    def remove(self, model_id: str) -> None:
        """Forget a model."""
        self._models.pop(model_id, None)

    def ending(self) -> QueuedModel | None:
        """A model that has to be unloaded."""
        return next((model for model in self._models.values() if model.ending), None)

    def next_turn(self) -> Sequence[tuple[QueuedModel, StoredRequest]]:
        """Requests to run now: one request, or passes of different models; empty if none can run."""
        turn: list[tuple[QueuedModel, StoredRequest]] = []
        tokens = 0
        for model in sorted(self._models.values(), key=lambda item: item.served):
            request = model.ready
            if request is None or model.ending:
                continue
            if turn and (request.kind != "pass" or tokens + request.tokens > self._most_pass_tokens):
                continue
            turn.append((model, request))
            tokens += request.tokens
            if request.kind != "pass":
                break
        self._turn += 1
        for model, _ in turn:
            model.served = self._turn
        return turn
