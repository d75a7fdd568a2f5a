"""Ranks that share sequences: what they compute together is what one process computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl.batch import TrainingBatch
from skyrl.config import TrainerConfig
from skyrl.errors import ModelError
from skyrl.learners.workers.group import ScorerGroup
from skyrl.learners.workers.objectives import ReturnRegression
from skyrl.learners.workers.roles import RefWorker
from skyrl.planning.replicas import Replicas
from skyrl.training.objective import policy_objective
from skyrl.tree import evolve_at
from tests.inference.nano import nano_model
from tests.learners.pool import Pool
from tests.learners.rows import batch
from tests.learners.spreading import CONTEXT, SHARING, assert_same_numbers, assert_same_weights, changed, copies
from tests.learners.test_policy_worker import grouped
from tests.learners.updating import CriticWorker, LearnerGroup, PolicyWorker
from tests.long_cases import long_except

pytestmark = pytest.mark.xdist_group("ranks")

TOGETHER = Replicas((0, 0))


def compared(rows: TrainingBatch) -> TrainingBatch:
    """The rows with log-probabilities of a reference."""
    return rows.with_fields(ref_logprobs=torch.where(rows.loss_mask, -5.0, 0.0))


def at_the_end_alone() -> TrainingBatch:
    """A row of 5 tokens, of which the last is learned: the rank that has the first three reads nothing."""
    row = batch(1)
    return evolve(row, loss_mask=row.loss_mask & (torch.arange(row.input_ids.shape[1]) == 4))


@pytest.mark.parametrize("sharing", [SHARING, CONTEXT])
async def test_shared_prompts_uneven_lengths_and_ranks_without_a_token_change_nothing(
    sharing: str, pool: Pool, small: TrainerConfig
) -> None:
    sizes = {"micro_train_batch_size_per_gpu": 6, "micro_forward_batch_size_per_gpu": 6}
    calm = {"policy.optimizer_config.adam_eps": 1e-6}  # a gradient that is rounding alone makes no whole step
    trainer = changed(small, sizes | calm)
    objective = policy_objective(trainer.algorithm)
    one = PolicyWorker(trainer, objective)
    group = pool.start(partial(PolicyWorker, evolve_at(trainer, sharing, 2), objective), 2, TOGETHER)
    two = LearnerGroup[PolicyWorker](group, objective, replicas=TOGETHER)
    for rows in (compared(grouped()), compared(at_the_end_alone())):  # 35 tokens, and 5
        torch.testing.assert_close(await two.score(rows), await one.score(rows), atol=1e-5, rtol=1e-5)
        assert_same_numbers(await one.update(rows), await two.update(rows))
    assert_same_weights(copies(one.weights()), await two.export_weights(copies))


@pytest.mark.parametrize("size", long_except(["sequence", "context"], "context"))
async def test_a_critic_shares_sequences_as_its_own_size_says(size: str, pool: Pool, small: TrainerConfig) -> None:
    objective = ReturnRegression(value_clip=None)
    rows = batch(6)
    rows = rows.with_fields(returns=torch.where(rows.loss_mask, 1.0, 0.0))
    one = CriticWorker(small, objective)
    shared = evolve_at(small, f"critic.{size}_parallel_size", 2)
    group = pool.start(partial(CriticWorker, shared, objective), 2, TOGETHER)
    two = LearnerGroup[CriticWorker](group, objective, replicas=TOGETHER)
    assert_same_numbers(await one.update(rows), await two.update(rows))
    torch.testing.assert_close(await two.score(rows), await one.score(rows), atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("size", ["sequence", "context", "tensor"])
async def test_a_reference_shares_sequences_as_its_own_size_says(size: str, pool: Pool, small: TrainerConfig) -> None:
    shared = evolve_at(small, f"ref.{size}_parallel_size", 2)
    two = ScorerGroup[RefWorker](pool.start(partial(RefWorker, shared), 2, TOGETHER), replicas=TOGETHER)
    torch.testing.assert_close(await two.score(batch(7)), await RefWorker(small).score(batch(7)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "ranks", "message"),
    [
        (
            "qwen2, windows of 6",
            2,
            r"every layer of the model sees the whole sequence.*set trainer\.policy\.sequence_p",
        ),
        ("qwen2", 3, r"3 ranks cannot share the model's 4 attention heads: set .*sequence_parallel_size = 1"),
    ],
)
async def test_models_whose_sequences_cannot_be_shared_are_refused(
    kind: str, ranks: int, message: str, pool: Pool, small: TrainerConfig, tmp_path: Path
) -> None:
    nano_model(kind).save_pretrained(tmp_path)
    values: dict[str, Any] = {"policy.model.path": str(tmp_path), SHARING: ranks}
    trainer = changed(small, values)
    with pytest.raises(ModelError, match=message):
        pool.start(partial(PolicyWorker, trainer, policy_objective(trainer.algorithm)), ranks)


class WatchedWorker(PolicyWorker):
    """Counts what forward keeps for backward."""

    async def kept(self, share: TrainingBatch) -> int:
        """Bytes that are kept for the backward pass of an update."""
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            await self.forward_backward_share(share, self.objective)
        return sum(sizes.values())


@pytest.mark.long
@pytest.mark.parametrize("sharing", [SHARING, CONTEXT])
async def test_two_ranks_keep_half_of_the_activations_of_a_long_answer(
    sharing: str, pool: Pool, small: TrainerConfig, tmp_path: Path
) -> None:
    tokens = 16_384
    config = nano_model().config
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    config.update({**layers, "max_position_embeddings": tokens})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer = changed(small, {"policy.model.path": str(tmp_path), "algorithm.use_kl_loss": False})
    objective = policy_objective(trainer.algorithm)
    ids = torch.arange(tokens).unsqueeze(0) % 250
    zeros, mask = torch.zeros(1, tokens), torch.arange(tokens).unsqueeze(0) > 8
    rows = TrainingBatch(
        input_ids=ids,
        lengths=torch.tensor([tokens]),
        loss_mask=mask,
        rollout_logprobs=zeros,
        rewards=zeros,
        groups=torch.zeros(1, dtype=torch.long),
        advantages=mask.float(),
    )
    share = objective.weigh(rows)
    single = await WatchedWorker(trainer, objective).kept(share)
    group = pool.start(partial(WatchedWorker, evolve_at(trainer, sharing, 2), objective), 2, TOGETHER)
    together = await group.deal(WatchedWorker.kept, [share, share])
    print(f"bytes kept for backward: {single} by one rank, {together} by two")
    assert single > 1e8
    assert max(together) <= 0.6 * single
