"""Checks of mixtures of experts: losses on routers, and routing replay."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.checks import warning
from skyrl.config.derive.engine_backends import backend_of, backends_that, kind_of_engine
from skyrl.config.derive.sizes import draws_rollouts, models_of
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import facts_of, reads
from skyrl.errors import Problem

_ENGINE, _RETURNED = "generator.inference_engine", "enable_return_routed_experts"


def routers_receive_gradients(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Reentrant checkpointing propagates gradients through the outputs of transformers' layers only, and router losses
    are not among those.
    """
    trainer = run.trainer
    costs = trainer.policy.router_aux_loss_coef or trainer.policy.router_z_loss_coef
    recomputes = trainer.recompute_activations and facts_of(trainer).recomputation is None
    if costs and recomputes and trainer.gradient_checkpointing_use_reentrant:
        yield Problem(
            path="trainer.gradient_checkpointing_use_reentrant",
            message="router losses get no gradient through reentrant gradient checkpointing",
            hint="set it to false",
        )


def replay_needs_returned_experts(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Routing replay needs an engine that returns the experts of each token."""
    engine = run.generator.inference_engine
    for model in models_of(run) if draws_rollouts(run) else ():
        if model == "critic" or not getattr(run.trainer, model).moe_enable_routing_replay:
            continue
        path = f"trainer.{model}.moe_enable_routing_replay"
        if _RETURNED not in backend_of(engine).fields:
            able = backends_that(lambda backend: _RETURNED in backend.fields)
            message = f"engines of the kind {kind_of_engine(engine)} do not return the experts of a rollout"
            yield Problem(path=path, message=message, hint=f"set it to false; the engines that return them are {able}")
        elif not engine.enable_return_routed_experts:
            message = "there is nothing to replay: the engines are not asked to return the experts they chose"
            yield Problem(path=path, message=message, hint=f"set {_ENGINE}.{_RETURNED} = true")


def megatron_routers_support_replay(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core cannot replay experts if its fused kernel or sinkhorn chooses them."""
    for model in models_of(run) if reads(run.trainer, "megatron_config") else ():
        section = getattr(run.trainer, model)
        if model == "critic" or not section.moe_enable_routing_replay:
            continue
        config = section.megatron_config
        choosing = {
            "moe_router_load_balancing_type": config.moe_router_load_balancing_type == "sinkhorn",
            "transformer_config_kwargs.moe_router_fusion": config.transformer_config_kwargs.get("moe_router_fusion"),
        }
        for name in (name for name, chooses in choosing.items() if chooses):
            yield Problem(
                path=f"trainer.{model}.megatron_config.{name}",
                message="Megatron-core then chooses the experts itself and replays nothing",
                hint=f"leave it out, or set trainer.{model}.moe_enable_routing_replay = false",
            )


def router_matches_model_config(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engines use the router of the model's own configuration; a different one changes the log-probabilities."""
    for model in models_of(run) if reads(run.trainer, "megatron_config") else ():
        config = getattr(run.trainer, model).megatron_config
        changed = {
            "moe_router_score_function": config.moe_router_score_function == "sigmoid",
            "moe_router_load_balancing_type": config.moe_router_load_balancing_type == "sinkhorn",
        }
        for name in (name for name, is_changed in changed.items() if is_changed):
            yield warning(
                path=f"trainer.{model}.megatron_config.{name}",
                message="engines route as the model's own configuration says: their log-probabilities will differ",
                hint="leave it out, unless the model was trained with it",
            )
