"""The tables of the three models of a reinforcement-learning run."""

from __future__ import annotations

from typing import Any

from skyrl.config.derive.model_tables import ModelTable
from skyrl.config.derive.sizes import Model, grid_of, has_critic, has_reference, models_of
from skyrl.config.settings.root import SkyRLTrainConfig


def _table(model: Model, **facts: Any) -> ModelTable:
    return ModelTable(
        path=f"trainer.{model}",
        trainer="trainer",
        ranks=lambda run: grid_of(run, model).ranks,
        updates=lambda run: _updates(run, model),
        **facts,
    )


def _updates(run: SkyRLTrainConfig, model: Model) -> int:
    trainer = run.trainer
    in_an_epoch = max(1, trainer.train_batch_size // getattr(trainer, f"{model}_mini_batch_size"))
    return int(trainer.update_epochs_per_batch * in_an_epoch)


POLICY = _table("policy", title="policy")
CRITIC = _table("critic", title="critic", exists=has_critic, exists_where="there is a critic")
REFERENCE = _table("ref", title="reference", learns=False, exists=has_reference, exists_where="a KL term is on")

RL_MODELS = (POLICY, CRITIC, REFERENCE)
"""Models of a reinforcement-learning run, in the order in which messages name them."""


def shares_gpus(run: SkyRLTrainConfig) -> bool:
    """Whether several models, or models and engines, take turns on the same GPUs."""
    placement = run.trainer.placement
    return placement.colocate_all or (placement.colocate_policy_ref and len(models_of(run)) > 1)
