"""A strategy runs the micro-batches of a step in its own order; `trainer.strategy` finds it by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from skyrl.config import TrainerConfig
from skyrl.errors import ConfigError
from skyrl.learners.fsdp2 import Fsdp2
from skyrl.learners.row_layouts import MicroBatch
from skyrl.learners.workers.strategies import STRATEGIES, strategy_named
from skyrl.training.objective import policy_objective
from tests.learners.rows import batch
from tests.learners.updating import PolicyWorker

T = TypeVar("T")


class AllForwardFirst(Fsdp2):
    """As a pipeline does: every forward pass before the first backward pass, and those in reverse order."""

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        read: Callable[[Any, MicroBatch], T],
        loss_of: Callable[[T, MicroBatch], Tensor],
    ) -> None:
        self.zero_grad()
        outputs = [read(self.model, micro) for micro in micro_batches]
        for output, micro in reversed(list(zip(outputs, micro_batches, strict=True))):
            loss_of(output, micro).backward()

    def forward(self, micro_batches: Sequence[MicroBatch], read: Callable[[Any, MicroBatch], T]) -> list[T]:
        with torch.no_grad():
            return [read(self.model, micro) for micro in reversed(micro_batches)][::-1]


async def test_a_strategy_with_another_order_of_passes_learns_and_scores_alike(
    small: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = policy_objective(small.algorithm)
    rows = batch(6).with_fields(ref_logprobs=torch.zeros(6, 12))
    plain = PolicyWorker(small, objective)
    monkeypatch.setitem(
        STRATEGIES, "fsdp2", lambda source, section, context: AllForwardFirst(source, section.fsdp_config, context)
    )
    other = PolicyWorker(small, objective)
    assert isinstance(other.strategy, AllForwardFirst)
    one, two = await plain.update(rows), await other.update(rows)
    assert two == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in one.items()}
    torch.testing.assert_close(await other.score(rows), await plain.score(rows), atol=1e-5, rtol=1e-5)


def test_a_strategy_without_a_learner_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.strategy[\s\S]*no learner for 'pathways'[\s\S]*fsdp2"):
        strategy_named("pathways")
