"""Checks of runs under Megatron: what its learners do not do, which others do."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.sizes import models_of
from skyrl.errors import Problem
from skyrl.tree.rules import Check

_OTHERS = "or trainer.strategy = fsdp2"


def megatron_steps_by_adam_or_sgd(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core has no Muon of its own: it takes that of a package that it does not come with."""
    if _is_megatron(run) and run.trainer.policy.optimizer_config.optimizer == "muon":
        yield Problem(
            path="trainer.policy.optimizer_config.optimizer",
            message="Megatron-core has no muon",
            hint=f"set it to adamw or sgd, {_OTHERS}",
        )


def megatron_drops_nothing(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The attention inside packed rows that Megatron is given is without dropout, and so are its adapters."""
    if not _is_megatron(run):
        return
    policy, message = run.trainer.policy, "strategy = megatron trains without dropout"
    if policy.use_dropout:
        yield Problem(path="trainer.policy.use_dropout", message=message, hint=f"set it to false, {_OTHERS}")
    if policy.model.lora.rank and policy.model.lora.dropout:
        yield Problem(path="trainer.policy.model.lora.dropout", message=message, hint=f"set it to 0, {_OTHERS}")


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
    if not _is_megatron(run) or "ref" not in models_of(run) or not shares:
        return
    for name in ("tensor_model", "pipeline_model", "context"):
        field = f"megatron_config.{name}_parallel_size"
        policy, ref = (
            getattr(section.megatron_config, f"{name}_parallel_size")
            for section in (run.trainer.policy, run.trainer.ref)
        )
        if policy != ref:
            yield Problem(
                path=f"trainer.ref.{field}",
                message=f"{ref} where the policy has {policy}: models in the same processes have the same degrees",
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
