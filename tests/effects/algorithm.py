"""Probes of `trainer.algorithm`: what the objective computes on a small batch."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.batch import TrainingBatch
from skyrl.learners.regression import ReturnRegression
from skyrl.training.advantage import advantage_estimator, critic_targets
from skyrl.training.objective import policy_objective
from skyrl.training.shaping import reward_shaping
from tests.effects.observables import plain
from tests.effects.probe import Probe, Scene, observable

A = "trainer.algorithm."
CRITIC: dict[str, Any] = {"trainer.critic.model.path": "{nano}/model", "trainer.critic_mini_batch_size": 4}


def small_batch() -> TrainingBatch:
    """Eight answers of up to five tokens, two to each prompt. All log-probabilities differ by up to about two nats, and
    rewards are high and low, so that every bound is met by some token.
    """
    numbers = torch.Generator().manual_seed(1)
    lengths = torch.tensor([6, 5, 4, 6, 3, 6, 5, 6])
    columns = torch.arange(6)
    mask = (columns >= 1) & (columns < lengths.unsqueeze(1))

    def logprobs(spread: float) -> torch.Tensor:
        return torch.where(mask, -2.0 + spread * torch.randn(mask.shape, generator=numbers), 0.0)

    return TrainingBatch(
        input_ids=torch.randint(0, 250, mask.shape, generator=numbers),
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=logprobs(0.7),
        old_logprobs=logprobs(0.7),
        ref_logprobs=logprobs(0.5),
        rewards=torch.where(mask, torch.randn(mask.shape, generator=numbers), 0.0),
        groups=torch.arange(8) // 2,
        answer_lengths=lengths - 1,
        baselines=torch.randn(8, generator=numbers),
        advantages=torch.where(mask, torch.randn(mask.shape, generator=numbers), 0.0),
        values=torch.where(mask, torch.randn(mask.shape, generator=numbers), 0.0),
        returns=torch.where(mask, torch.randn(mask.shape, generator=numbers), 0.0),
    )


@observable("the policy's loss of a batch, and its gradient")
def policy_loss(scene: Scene) -> object:
    torch.manual_seed(0)  # clip_cov draws its tokens
    trainer, batch = scene.run.trainer, small_batch()
    objective = policy_objective(trainer.algorithm, micro_batch_rows=trainer.micro_train_batch_size_per_gpu)
    weighed = objective.weigh(batch)
    assert weighed.old_logprobs is not None
    logprobs = (weighed.old_logprobs + 0.5 * torch.sin(weighed.input_ids.float())).requires_grad_()
    loss, parts, numbers = objective(logprobs, weighed, entropy=logprobs.square() if objective.wants_entropy else None)
    loss.backward()
    return plain([loss, logprobs.grad, parts, numbers])


@observable("the advantages of a batch")
def advantages(scene: Scene) -> object:
    return plain(advantage_estimator(scene.run.trainer.algorithm)(small_batch()))


@observable("what the critic learns from a batch: targets, loss and gradient")
def critic_loss(scene: Scene) -> object:
    algorithm, batch = scene.run.trainer.algorithm, small_batch()
    assert batch.values is not None
    objective, targets = ReturnRegression(value_clip=algorithm.value_clip), critic_targets(algorithm)(batch)
    values = (batch.values + torch.cos(batch.input_ids.float())).requires_grad_()
    loss, _, _ = objective(values, objective.weigh(batch.given(returns=targets)))
    loss.backward()
    return plain([targets, loss, values.grad])


@observable("the shaped rewards of a batch, and the KL weight of the next one")
def rewards(scene: Scene) -> object:
    shaping = reward_shaping(scene.run.trainer.algorithm)
    return plain([shaping(small_batch()), shaping.state()])


def _loss(name: str, **tables: Any) -> list[Probe]:
    """Probes of a loss's own settings."""
    return [
        Probe(f"{A}{name}.{field}", value, policy_loss, {f"{A}policy_loss_type": name})
        for field, value in tables.items()
    ]


PROBES: tuple[Probe, ...] = (
    Probe(f"{A}advantage_estimator", "rloo", advantages),
    Probe(f"{A}policy_loss_type", "sapo", policy_loss),
    Probe(f"{A}loss_reduction", "sequence_mean", policy_loss),
    Probe(f"{A}value_clip", 0.5, critic_loss, CRITIC),
    Probe(f"{A}reward_shaping.scale", 2.0, rewards),
    *_loss("sapo", tau_pos=2.0, tau_neg=2.0),
)
