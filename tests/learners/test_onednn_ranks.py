"""Linear layers by oneDNN inside FSDP2, which gathers their weights for a pass and frees them behind it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from skyrl.config import TrainerConfig
from skyrl.models import onednn
from skyrl.training.objective import policy_objective
from skyrl.tree import evolve_at
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.learners.updating import LearnerGroup, PolicyWorker

pytestmark = pytest.mark.xdist_group("ranks")

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}


class Counting(PolicyWorker):
    """A policy whose layers compute by oneDNN whatever the processor, and which counts these products."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.products, self._patch, product = 0, pytest.MonkeyPatch(), onednn.product

        def counted(*operands: Any) -> torch.Tensor:
            self.products += 1
            return product(*operands)

        self._patch.setattr(onednn, "outruns_mkl", lambda: True)
        self._patch.setattr(onednn, "FEWEST_ROWS", 8)
        self._patch.setattr(onednn, "product", counted)
        super().__init__(*args, **kwargs)

    def counted(self) -> int:
        """Products so far."""
        return self.products

    def close(self) -> None:
        """Leaves the process as it was."""
        self._patch.undo()
        super().close()


@pytest.mark.long
@pytest.mark.parametrize("recomputing", [pytest.param(False, marks=pytest.mark.long), True])
async def test_sharded_layers_by_onednn_learn_as_plain_ones_do(
    pool: Pool, small: TrainerConfig, recomputing: bool
) -> None:
    trainer = evolve_at(small, "policy.model_config_kwargs", WIDE)
    trainer = evolve_at(trainer, "policy.model.init_from_scratch", True)
    trainer = evolve_at(trainer, "recompute_activations", recomputing)
    objective, rows = policy_objective(trainer.algorithm), batch(8)
    rows = rows.with_fields(old_logprobs=rows.rollout_logprobs, ref_logprobs=rows.rollout_logprobs)
    plain = PolicyWorker(trainer, objective)
    ranks = pool.start(partial(Counting, trainer, objective), 2)
    learner = LearnerGroup[Counting](ranks, objective)
    before = min([await handle.call(Counting.counted) for handle in ranks.handles])
    for _ in range(3):
        expected, metrics = await plain.update(rows), await learner.update(rows)
        assert metrics == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in expected.items()}
    after = min([await handle.call(Counting.counted) for handle in ranks.handles])
    layers, micro_batches, passes = 2 * 7, 2, 4 if recomputing else 3
    assert after - before == 3 * layers * micro_batches * passes, "each linear layer of each rank ran by oneDNN"
    weights = await learner.export_weights(copies)
    for name, weight in plain.weights():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-5)


def copies(weights: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in weights}
