"""Mixtures of experts in learners of one process, and with experts spread over ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from skyrl.batch import TrainingBatch
from skyrl.config import TrainerConfig
from skyrl.errors import ModelError
from skyrl.models.parallel.expert_parallel import grouped_product, one_kernel
from skyrl.training.objective import policy_objective
from tests.inference.nano import nano_model
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.learners.spreading import (
    CONTEXT,
    FSDP,
    SHARING,
    STEPS,
    Spread,
    Trained,
    assert_same_numbers,
    assert_same_weights,
    changed,
    mini_batch,
    stored,
    weights_of,
)
from tests.learners.updating import LearnerGroup, PolicyWorker
from tests.long_cases import long_except

EXPERTS = "policy.expert_parallel_size"
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "2 ranks spread experts": ({EXPERTS: 2}, 2),
    "2x2 ranks spread experts": ({EXPERTS: 2}, 4),
    "4 ranks spread experts": ({EXPERTS: 4}, 4),
    "2x2 ranks spread experts and share sequences": ({EXPERTS: 2, SHARING: 2}, 4),
    "2x2 ranks spread experts and share keys": ({EXPERTS: 4, CONTEXT: 2}, 4),
    "2 ranks spread experts, a row at a time": ({EXPERTS: 2, "micro_train_batch_size_per_gpu": 1}, 2),
    "2 ranks spread experts, recomputing": ({EXPERTS: 2, "recompute_activations": True}, 2),
    "2 ranks spread experts, padded": ({EXPERTS: 2, "use_sample_packing": False}, 2),
    "2 ranks spread experts, resting on the host": ({EXPERTS: 2, FSDP + "cpu_offload": True}, 2),
}

STEADY = {"policy.optimizer_config.adam_eps": 1e-6}
"""Clipping takes a gradient norm of hundreds down to 1: by AdamW's usual 1e-8 a gradient that is rounding alone would
be a whole step."""

ROUTED = {
    "policy.router_aux_loss_coef": 0.5,
    "policy.router_z_loss_coef": 0.01,
    "policy.moe_enable_routing_replay": True,
}
"""Routers learn, and half of the rows replay experts."""

pytestmark = pytest.mark.xdist_group("ranks")


def routed(plain: TrainingBatch, experts: int = 8, layers: int = 2) -> TrainingBatch:
    """The rows with two experts drawn for each token and layer, and with none in every other row."""
    numbers = torch.rand((*plain.input_ids.shape, layers, experts), generator=torch.Generator().manual_seed(len(plain)))
    chosen = numbers.topk(2).indices.to(torch.int16)
    chosen[::2] = -1
    return attrs.evolve(plain, routed_experts=chosen)


async def routed_course(learner: LearnerGroup[PolicyWorker]) -> Trained:
    metrics = [await learner.update(routed(mini_batch(step))) for step in range(STEPS)]
    return Trained(metrics, await weights_of(learner), await learner.score(routed(batch(7))))


def policy(small: TrainerConfig, folder: Path, *, packing: bool) -> PolicyWorker:
    path = str(folder)
    values = {"policy.model.path": path, "use_sample_packing": packing, **STEADY, **ROUTED}
    trainer = changed(small, values)
    return PolicyWorker(trainer, policy_objective(trainer.algorithm))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
async def test_packed_rows_of_a_mixture_of_experts_are_padded_ones(
    kind: str, small: TrainerConfig, tmp_path: Path
) -> None:
    nano_model(kind).save_pretrained(tmp_path)
    packed, padded = (policy(small, tmp_path, packing=packing) for packing in (True, False))
    experts = {"qwen3_moe": 8, "mixtral": 4}[kind]
    rows = routed(batch(7), experts)
    torch.testing.assert_close(await packed.score(rows), await padded.score(rows), atol=1e-5, rtol=1e-5)
    rows = routed(mini_batch(0), experts)
    assert_same_numbers(await padded.update(rows), await packed.update(rows))
    weights = dict(packed.weights())
    for name, value in padded.weights():
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def mixture(pool: Pool, small: TrainerConfig, tmp_path_factory: pytest.TempPathFactory) -> Spread:
    """Learners of a model with 8 experts, of which a token meets 2."""
    folder = tmp_path_factory.mktemp("mixture")
    nano_model("qwen3_moe").save_pretrained(folder)
    values = {
        "policy.model.path": str(folder),
        **STEADY,
        **ROUTED,
    }
    return Spread(pool, lambda ranks: pool, changed(small, values))


@pytest.fixture(scope="module")
def baseline(mixture: Spread) -> Trained:
    return asyncio.run(routed_course(mixture.policy({}, 1)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", long_except(WAYS, "2x2 ranks spread experts"))
async def test_five_steps_with_spread_experts_are_those_of_one_process(
    name: str, mixture: Spread, baseline: Trained
) -> None:
    other = await routed_course(mixture.policy(*WAYS[name]))
    for one, two in zip(baseline.metrics, other.metrics, strict=True):
        assert_same_numbers(one, two)
    assert_same_weights(baseline.weights, other.weights)
    torch.testing.assert_close(other.scores, baseline.scores, atol=2e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("2x2 ranks spread experts", None), pytest.param(None, "4 ranks spread experts", marks=pytest.mark.long)],
)
async def test_a_state_with_spread_experts_goes_on_in_one_process_and_back(
    saved: str | None, loaded: str | None, mixture: Spread, baseline: Trained, tmp_path: Path
) -> None:
    first = mixture.policy(*(WAYS[saved] if saved else ({}, 1)))
    for step in range(3):
        await first.update(routed(mini_batch(step)))
    tensors, numbers = await stored(first, tmp_path)
    other = mixture.policy(*(WAYS[loaded] if loaded else ({}, 1)))
    await other.load_state(tensors, numbers)
    for step in (3, 4):
        assert_same_numbers(baseline.metrics[step], await other.update(routed(mini_batch(step))))
    assert_same_weights(baseline.weights, await weights_of(other))


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("mixtral", 4, None),
        ("qwen3", 2, "this model has no experts that ranks could share: set trainer.policy.expert_parallel_size = 1"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    kind: str, size: int, message: str | None, pool: Pool, small: TrainerConfig, tmp_path: Path
) -> None:
    model = nano_model(kind)
    model.save_pretrained(tmp_path)
    values: dict[str, Any] = {"policy.model.path": str(tmp_path), EXPERTS: size}
    spread = Spread(pool, lambda ranks: pool, small)
    if message is None:
        spread.policy(values, 4)
        return
    with pytest.raises(ModelError, match=message):
        spread.policy(values, size)


@pytest.mark.parametrize("sizes", [(3, 0, 2, 4), (0, 0, 0, 9)])
def test_one_kernel_for_all_experts_computes_the_products_of_each(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 16, generator=generator).requires_grad_()
    matrices = torch.randn(4, 32, 16, generator=generator).requires_grad_()
    outputs = []
    for product in (grouped_product, one_kernel):
        answer = product(rows, matrices, torch.tensor(sizes))
        outputs.append((answer, *torch.autograd.grad(answer.square().sum(), (rows, matrices))))
    for plain, fused in zip(*outputs, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-5)
