"""The roles of a reinforcement-learning run: policy, critic, reference and teacher."""

from __future__ import annotations

from functools import partial
from typing import Any

from skyrl.config.derive.algorithm_facts import loss_facts
from skyrl.config.derive.model_tables import Role
from skyrl.config.settings.root import SkyRLTrainConfig


def has_critic(run: SkyRLTrainConfig) -> bool:
    """Whether the run has a critic, a model that predicts returns."""
    return bool(run.trainer.critic.model.path)


def has_reference(run: SkyRLTrainConfig) -> bool:
    """Whether the policy is compared with a reference model: by a KL term, or by its loss."""
    algorithm = run.trainer.algorithm
    return bool(algorithm.use_kl_loss or algorithm.use_kl_in_reward or loss_facts(algorithm).learns_from_pairs)


def has_local_teacher(run: SkyRLTrainConfig) -> bool:
    """Whether the run itself holds teachers, frozen models that the policy is distilled from."""
    return bool(run.trainer.teacher.local_paths)


def has_served_teacher(run: SkyRLTrainConfig) -> bool:
    """Whether a server scores tokens as a teacher."""
    return bool(run.trainer.teacher.endpoint.url or run.trainer.teacher.endpoint.sources)


def has_teacher(run: SkyRLTrainConfig) -> bool:
    """Whether the policy is distilled from another model, local or served."""
    return has_local_teacher(run) or has_served_teacher(run)


def distills(run: SkyRLTrainConfig) -> bool:
    """Whether the policy learns from a teacher, another model or itself with a hint."""
    return has_teacher(run) or run.trainer.algorithm.distillation.self_teacher


def moves_teacher(run: SkyRLTrainConfig) -> bool:
    """Whether the teacher is a moving average of the policy."""
    return bool(run.trainer.teacher.model.path) and run.trainer.algorithm.distillation.teacher_update_rate is not None


def gives_advantages(run: SkyRLTrainConfig) -> bool:
    """Whether a teacher's log-probabilities of the sampled tokens are added to their advantages."""
    return distills(run) and run.trainer.algorithm.distillation.type == "advantage"


def gives_distributions(run: SkyRLTrainConfig) -> bool:
    """Whether the divergence from a teacher's distributions is a part of the policy's loss."""
    return distills(run) and run.trainer.algorithm.distillation.type == "loss"


def gives_whole_distributions(run: SkyRLTrainConfig) -> bool:
    """Whether that divergence is over all tokens, from a teacher's hidden states."""
    return gives_distributions(run) and run.trainer.algorithm.distillation.top_k is None


def _role(name: str, title: str, **facts: Any) -> Role:
    return Role(
        name=name,
        title=title,
        path=f"trainer.{name}",
        trainer="trainer",
        placement=f"trainer.placement.{name}_",
        stored_as=name,
        optimizer_steps=partial(_optimizer_steps, name),
        **facts,
    )


def _optimizer_steps(model: str, run: SkyRLTrainConfig) -> int:
    trainer = run.trainer
    in_an_epoch = max(1, trainer.train_batch_size // getattr(trainer, f"{model}_mini_batch_size"))
    return int(trainer.update_epochs_per_batch * in_an_epoch)


POLICY = _role("policy", "policy", is_sampled_from=True, exported_as="policy")
CRITIC = _role("critic", "critic", scores=True, exists=has_critic, exists_where="there is a critic")
REFERENCE = _role(
    "ref",
    "reference",
    learns=False,
    exists=has_reference,
    exists_where="a KL term or online_dpo compares with a reference",
)
TEACHER = _role("teacher", "teacher", learns=False, exists=has_local_teacher, exists_where="there is a local teacher")

RL_ROLES = {role.name: role for role in (POLICY, CRITIC, REFERENCE, TEACHER)}
"""Name -> role, in the order in which messages name them."""


def shares_gpus(run: SkyRLTrainConfig) -> bool:
    """Whether several models, or models and engines, take turns on the same GPUs."""
    placement, models = run.trainer.placement, sum(role.exists(run) for role in RL_ROLES.values())
    return placement.colocate_all or (placement.colocate_policy_ref and models > 1)
