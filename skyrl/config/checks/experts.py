"""Checks of mixtures of experts: what their routers learn from, and whose choices they repeat."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.engines import backend_of, backends_that, kind_of_engine
from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.sizes import models_of, samples
from skyrl.errors import Problem
from skyrl.tree.rules import Check

_ENGINE, _RETURNED = "generator.inference_engine", "enable_return_routed_experts"

_COSTS = ("router_aux_loss_coef", "router_z_loss_coef")


def routers_learn_in_transformers_layers(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The losses of routers are taken from transformers' layers; Megatron has layers of its own."""
    if run.trainer.strategy == "megatron":
        for name in _COSTS:
            if getattr(run.trainer.policy, name):
                message = "strategy = megatron does not read it"
                hint = "set it to 0, or trainer.strategy = fsdp2"
                yield Problem(path=f"trainer.policy.{name}", message=message, hint=hint)


def routers_are_reached_by_gradients(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Reentrant checkpointing gives gradients to the outputs of layers alone, and what routers cost is beside them."""
    trainer = run.trainer
    costs = any(getattr(trainer.policy, name) for name in _COSTS)
    if costs and trainer.recompute_activations and trainer.gradient_checkpointing_use_reentrant:
        yield Problem(
            path="trainer.gradient_checkpointing_use_reentrant",
            message="the reentrant form of gradient checkpointing gives the losses of routers no gradient",
            hint="set it to false",
        )


def replayed_experts_are_returned(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A learner replays what engines return, and transformers' layers can be told."""
    engine = run.generator.inference_engine
    for model in models_of(run):
        if model == "critic" or not getattr(run.trainer, model).moe_enable_routing_replay:
            continue
        path = f"trainer.{model}.moe_enable_routing_replay"
        if run.trainer.strategy == "megatron":
            message = "strategy = megatron has not implemented it yet: replaying experts under Megatron"
            yield Problem(path=path, message=message, hint="set it to false, or trainer.strategy = fsdp2")
        if not samples(run):
            continue
        if _RETURNED not in backend_of(engine).fields:
            able = backends_that(lambda backend: _RETURNED in backend.fields)
            message = f"the experts of a rollout are not known from engines of the kind {kind_of_engine(engine)}"
            yield Problem(path=path, message=message, hint=f"set it to false; {able} return them")
        elif not engine.enable_return_routed_experts:
            message = "there is nothing to replay: engines do not return the experts that they chose"
            yield Problem(path=path, message=message, hint=f"set {_ENGINE}.{_RETURNED} = true")


EXPERT_CHECKS: tuple[Check[SkyRLTrainConfig], ...] = (
    routers_learn_in_transformers_layers,
    routers_are_reached_by_gradients,
    replayed_experts_are_returned,
)
