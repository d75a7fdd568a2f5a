"""Checks of runs under Megatron: unsupported features, and degrees of parallelism that fit together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from skyrl.config.derive.sizes import degrees_of, grid_of, models_of, trained_models
from skyrl.config.settings.megatron import MegatronConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import facts_of, reads
from skyrl.errors import Problem
from skyrl.planning.batches import divisors, nearest, nearest_divisors
from skyrl.planning.topology import Degrees
from skyrl.tree import get_at

_OTHERS = "or trainer.strategy = fsdp2"


def megatron_needs_cuda(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core calls CUDA itself: it has no other device."""
    if _is_megatron(run) and run.trainer.device not in facts_of(run.trainer).devices:
        yield Problem(
            path="trainer.strategy",
            message=f"megatron needs the device cuda, but trainer.device is {run.trainer.device}",
            hint="set it to fsdp2, or trainer.device = cuda if the run is for a machine with GPUs",
        )


def megatron_needs_adam_or_sgd(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core has no Muon of its own: it imports one from a package that it does not require."""
    for model in trained_models(run) if _is_megatron(run) else ():
        if getattr(run.trainer, model).optimizer_config.optimizer == "muon":
            yield Problem(
                path=f"trainer.{model}.optimizer_config.optimizer",
                message="Megatron-core has no muon",
                hint=f"set it to adamw or sgd, {_OTHERS}",
            )


def megatron_has_no_dropout(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Attention over packed rows and adapters have no dropout under Megatron."""
    message = "strategy = megatron trains without dropout"
    for model in trained_models(run) if _is_megatron(run) else ():
        section, path = getattr(run.trainer, model), f"trainer.{model}."
        if section.use_dropout:
            yield Problem(path=f"{path}use_dropout", message=message, hint=f"set it to false, {_OTHERS}")
        if section.model.lora.rank and section.model.lora.dropout:
            yield Problem(path=f"{path}model.lora.dropout", message=message, hint=f"set it to 0, {_OTHERS}")


def megatron_offloads_no_activations(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Only activations of transformers' layers can be offloaded to the host; Megatron's are kept or recomputed."""
    if _is_megatron(run) and run.trainer.offload_activations:
        yield Problem(
            path="trainer.offload_activations",
            message="strategy = megatron does not offload activations to the host",
            hint="set it to false; recomputation is set in trainer.policy.megatron_config.transformer_config_kwargs",
        )


def colocated_models_share_megatron_degrees(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core has one set of process groups per process."""
    shares = run.trainer.placement.colocate_all or run.trainer.placement.colocate_policy_ref
    if not _is_megatron(run) or not shares:
        return
    others = [model for model in models_of(run) if model != "policy"]
    degrees = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    for model, name in product(others, degrees):
        field = f"megatron_config.{name}_parallel_size"
        policy, own = (get_at(run, f"trainer.{each}.{field}") for each in ("policy", model))
        if policy != own:
            yield Problem(
                path=f"trainer.{model}.{field}",
                message=f"{own}, but the policy has {policy}: models in the same processes need the same degrees",
                hint=f"set it to {policy}, or trainer.placement.colocate_all and colocate_policy_ref = false",
            )


def expert_degrees_divide_stage_ranks(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Expert tensor x expert parallel ranks divide the ranks of a pipeline stage."""
    for path, _, ranks, degrees in _tables(run):
        stages, tensor = degrees.pipeline, degrees.expert_tensor
        cutting = stages * tensor
        if ranks % cutting:
            yield Problem(
                path=f"{path}.expert_tensor_parallel_size",
                message=f"pipeline x expert tensor = {stages} x {tensor} does not divide the model's {ranks} ranks",
                hint="set it to tensor_model_parallel_size, or leave it out",
            )
        elif ranks // cutting % degrees.expert:
            size, fitting = degrees.expert, divisors(ranks // cutting)
            yield Problem(
                path=f"{path}.expert_model_parallel_size",
                message=f"{size} does not divide {ranks // cutting}: the model's {ranks} ranks over pipeline x expert "
                f"tensor = {cutting}",
                hint=nearest_divisors(nearest(size, fitting)),
            )


def flex_dispatch_needs_expert_parallel(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The flex dispatcher needs experts on other ranks."""
    for path, config, _, degrees in _tables(run):
        if config.moe_token_dispatcher_type == "flex" and degrees.experts == 1:
            yield Problem(
                path=f"{path}.moe_token_dispatcher_type",
                message="flex needs experts on other ranks, but every rank has all experts",
                hint="set it to alltoall, or expert_model_parallel_size above 1",
            )


def megatron_supports_router(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core has softmax and sigmoid scores, and an expert bias only with sigmoid."""
    for path, config, *_ in _tables(run):
        score = config.moe_router_score_function
        if score == "sqrtsoftplus":
            message = "Megatron-core 0.16 has no score function sqrtsoftplus"
            yield Problem(path=f"{path}.moe_router_score_function", message=message, hint="softmax or sigmoid")
        elif config.moe_router_enable_expert_bias and score != "sigmoid":
            yield Problem(
                path=f"{path}.moe_router_enable_expert_bias",
                message="Megatron-core has an expert bias only with sigmoid scores",
                hint=f"set it to false, or {path}.moe_router_score_function = sigmoid",
            )


def router_matches_model_config(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engines use the router of the model's own configuration; a different one changes the log-probabilities."""
    for path, config, *_ in _tables(run):
        changed = {
            "moe_router_score_function": config.moe_router_score_function == "sigmoid",
            "moe_router_load_balancing_type": config.moe_router_load_balancing_type == "sinkhorn",
        }
        for name in (name for name, is_changed in changed.items() if is_changed):
            yield Problem(
                path=f"{path}.{name}",
                message="engines route as the model's own configuration says: their log-probabilities will differ",
                hint="leave it out, unless the model was trained with it",
                severity="warning",
            )


def _tables(run: SkyRLTrainConfig) -> Iterator[tuple[str, MegatronConfig, int, Degrees]]:
    """Path and content of `megatron_config` of each model under Megatron, the ranks of the model, and its degrees."""
    for model in models_of(run) if _is_megatron(run) else ():
        section = getattr(run.trainer, model)
        yield (
            f"trainer.{model}.megatron_config",
            section.megatron_config,
            grid_of(run, model).ranks,
            degrees_of(run, model),
        )


def _is_megatron(run: SkyRLTrainConfig) -> bool:
    return reads(run.trainer, "megatron_config")
