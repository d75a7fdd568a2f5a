"""Checks of runs under Megatron: what its learners do not do, which others do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.sizes import models_of, trained_models
from skyrl.errors import Problem
from skyrl.tree import get_at
from skyrl.tree.rules import Check

_OTHERS = "or trainer.strategy = fsdp2"


def megatron_steps_by_adam_or_sgd(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core has no Muon of its own: it takes that of a package that it does not come with."""
    for model in trained_models(run) if _is_megatron(run) else ():
        if getattr(run.trainer, model).optimizer_config.optimizer == "muon":
            yield Problem(
                path=f"trainer.{model}.optimizer_config.optimizer",
                message="Megatron-core has no muon",
                hint=f"set it to adamw or sgd, {_OTHERS}",
            )


def megatron_drops_nothing(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The attention inside packed rows that Megatron is given is without dropout, and so are its adapters."""
    message = "strategy = megatron trains without dropout"
    for model in trained_models(run) if _is_megatron(run) else ():
        section, path = getattr(run.trainer, model), f"trainer.{model}."
        if section.use_dropout:
            yield Problem(path=f"{path}use_dropout", message=message, hint=f"set it to false, {_OTHERS}")
        if section.model.lora.rank and section.model.lora.dropout:
            yield Problem(path=f"{path}model.lora.dropout", message=message, hint=f"set it to 0, {_OTHERS}")


def megatron_keeps_activations_on_the_gpu(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Activations of transformers' layers go to the host; Megatron's are kept or recomputed."""
    if _is_megatron(run) and run.trainer.offload_activations:
        yield Problem(
            path="trainer.offload_activations",
            message="strategy = megatron does not send activations to the host",
            hint="set it to false, and recomputation in trainer.policy.megatron_config.transformer_config_kwargs",
        )


def models_on_the_same_gpus_have_the_same_degrees(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core keeps one set of groups of ranks in a process."""
    shares = run.trainer.placement.colocate_all or run.trainer.placement.colocate_policy_ref
    if not _is_megatron(run) or not shares:
        return
    others = [model for model in models_of(run) if model != "policy"]
    for model, name in product(others, ("tensor_model", "pipeline_model", "context")):
        field = f"megatron_config.{name}_parallel_size"
        policy, own = (get_at(run, f"trainer.{each}.{field}") for each in ("policy", model))
        if policy != own:
            yield Problem(
                path=f"trainer.{model}.{field}",
                message=f"{own} where the policy has {policy}: models in the same processes have the same degrees",
                hint=f"set it to {policy}, or trainer.placement.colocate_all and colocate_policy_ref = false",
            )


MEGATRON_CHECKS: tuple[Check[SkyRLTrainConfig], ...] = (
    megatron_steps_by_adam_or_sgd,
    megatron_drops_nothing,
    megatron_keeps_activations_on_the_gpu,
    models_on_the_same_gpus_have_the_same_degrees,
)


def _is_megatron(run: SkyRLTrainConfig) -> bool:
    return run.trainer.strategy == "megatron"
