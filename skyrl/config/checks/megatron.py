"""Checks of runs of every kind under Megatron: unsupported features, and degrees of parallelism that fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl.config.derive.model_tables import Role
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.settings.strategies import facts_of, reads
from skyrl.errors import Problem
from skyrl.planning.batches import divisors, nearest, nearest_divisors

if TYPE_CHECKING:
    from skyrl.config.checks.every_kind import Run

_TABLE = "megatron_config"

_OPTIMIZER_FIELDS = {
    "optimizer": "optimizer_config.optimizer",
    "lr": "optimizer_config.lr",
    "min_lr": "optimizer_config.min_lr_ratio",
    "weight_decay": "optimizer_config.weight_decay",
    "adam_beta1": "optimizer_config.adam_betas",
    "adam_beta2": "optimizer_config.adam_betas",
    "adam_eps": "optimizer_config.adam_eps",
    "clip_grad": "optimizer_config.max_grad_norm",
    "overlap_param_gather": f"{_TABLE}.ddp_config.overlap_param_gather",
}
"""Fields of Megatron's OptimizerConfig that a field of the model's table sets, each with the path of that field."""


def megatron_needs_cuda(run: Run) -> Iterator[Problem]:
    """Megatron-core calls CUDA itself: it has no other device."""
    trainer = run.trainer
    if reads(trainer, _TABLE) and trainer.device not in facts_of(trainer).devices:
        device = trainer.path_of("device")
        yield Problem(
            path=trainer.path_of("strategy"),
            message=f"megatron needs the device cuda, but {device} is {trainer.device}",
            hint=f"set it to fsdp2, or {device} = cuda if the run is for a machine with GPUs",
        )


def megatron_offloads_no_activations(run: Run) -> Iterator[Problem]:
    """Only activations of transformers' layers can be offloaded to the host; Megatron's are kept or recomputed."""
    if reads(run.trainer, _TABLE) and run.trainer.offload_activations:
        yield Problem(
            path=run.trainer.path_of("offload_activations"),
            message="strategy = megatron does not offload activations to the host",
            hint="set it to false; transformer_config_kwargs of megatron_config say what is recomputed",
        )


def megatron_needs_adam_or_sgd(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Megatron-core has no Muon of its own: it imports one from a package that it does not require."""
    if model.learns and model.reads(run, _TABLE) and model.section(run).optimizer_config.optimizer == "muon":
        yield Problem(
            path=model.at("optimizer_config.optimizer"),
            message="Megatron-core has no muon",
            hint=f"set it to adamw or sgd, {_or_fsdp(run, model)}",
        )


def megatron_has_no_dropout(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Attention over packed rows and adapters have no dropout under Megatron."""
    if not model.learns or not model.reads(run, _TABLE):
        return
    section, message, others = model.section(run), "strategy = megatron trains without dropout", _or_fsdp(run, model)
    if section.use_dropout:
        yield Problem(path=model.at("use_dropout"), message=message, hint=f"set it to false, {others}")
    if section.model.lora.rank and section.model.lora.dropout:
        yield Problem(path=model.at("model.lora.dropout"), message=message, hint=f"set it to 0, {others}")


def expert_degrees_divide_stage_ranks(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Expert tensor x expert parallel ranks divide the ranks of a pipeline stage."""
    if not model.reads(run, _TABLE):
        return
    degrees, ranks, path = model.degrees(run), model.ranks(run), model.at(_TABLE)
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


def flex_dispatch_needs_expert_parallel(run: RunConfig, model: Role) -> Iterator[Problem]:
    """The flex dispatcher needs experts on other ranks."""
    if not model.reads(run, _TABLE):
        return
    if model.section(run).megatron_config.moe_token_dispatcher_type == "flex" and model.degrees(run).experts == 1:
        yield Problem(
            path=model.at("megatron_config.moe_token_dispatcher_type"),
            message="flex needs experts on other ranks, but every rank has all experts",
            hint="set it to alltoall, or expert_model_parallel_size above 1",
        )


def megatron_supports_router(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Megatron-core has softmax and sigmoid scores, and an expert bias only with sigmoid."""
    if not model.reads(run, _TABLE):
        return
    config, path = model.section(run).megatron_config, model.at(_TABLE)
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


def profiler_has_ranks_and_path(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A profiler that is on names the ranks that it traces and a folder for the traces."""
    path = model.at("megatron_config.torch_profiler_config")
    profiler = model.section(run).megatron_config.torch_profiler_config
    if not model.reads(run, _TABLE) or not profiler.enable:
        return
    if not profiler.ranks:
        yield Problem(path=f"{path}.ranks", message="the list is empty, but enable is on", hint="such as [0]")
    if not profiler.save_path:
        message, hint = "no folder is given for the traces, but enable is on", "set it to a local folder"
        yield Problem(path=f"{path}.save_path", message=message, hint=hint)
    elif "://" in profiler.save_path:
        message = f"{profiler.save_path} is not a local folder, but the profiler writes local files only"
        yield Problem(path=f"{path}.save_path", message=message, hint="set it to a local folder")


def optimizer_kwargs_have_no_field(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A setting that has a field is not set again in `optimizer_config_kwargs` under Megatron's name for it."""
    if not model.learns or not model.reads(run, _TABLE):
        return
    precision = dict.fromkeys(("bf16", "fp16", "params_dtype"), model.basics(run).path_of("compute_dtype"))
    fields = {name: model.at(field) for name, field in _OPTIMIZER_FIELDS.items()} | precision
    for name in model.section(run).megatron_config.optimizer_config_kwargs:
        if name in fields:
            yield Problem(
                path=model.at(f"{_TABLE}.optimizer_config_kwargs.{name}"),
                message=f"has a setting of its own: {fields[name]}",
                hint="set that one",
            )


def gather_overlap_needs_reduce_overlap(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Megatron gathers weights during forward only where it sums gradients during backward."""
    ddp = model.section(run).megatron_config.ddp_config
    if model.reads(run, _TABLE) and ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        path = model.at("megatron_config.ddp_config.overlap_param_gather")
        yield Problem(path=path, message="needs overlap_grad_reduce", hint="set that to true, or this to false")


def _or_fsdp(run: RunConfig, model: Role) -> str:
    return f"or {model.basics(run).path_of('strategy')} = fsdp2"
