"""Checks of one model's settings, the same for every model of every kind of run: adapters, FSDP and DeepSpeed.

Those of Megatron are in `megatron.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from skyrl.config.checks import functions_in, megatron, warning
from skyrl.config.derive.model_tables import Role
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.settings.learners import sets_dropout
from skyrl.errors import Problem
from skyrl.planning.batches import divisors, nearest, nearest_divisors
from skyrl.tree import get_at
from skyrl.tree.rules import Check
from skyrl.tree.types import display_value

WITHOUT_FIELDS = ("reduce_lr_on_plateau", "greedy")
"""Schedules with parameters that have no field."""

WRAPPED = "transformer_layer_cls_to_wrap"
"""The one entry of `fsdp_config.wrap_policy` that is read."""

LARGEST_RATE = 0.1
"""Learning rate above which AdamW destroys a pretrained model in a few steps; usual ones are 1e-7 to 1e-3."""

LARGEST_DECAY = 1.0
"""Weight decay above the range of published recipes, 0 to 0.1."""

LARGEST_EPSILON = 1e-2
"""Epsilon above which AdamW's steps depend on the size of gradients; usual ones are 1e-15 to 1e-5."""

_PLAIN_NAME = re.compile(r"\w+")

ModelCheck = Callable[[Any, Role], Iterator[Problem]]
"""A check of the table of one model in a resolved tree."""


def model_checks(models: Sequence[Role]) -> tuple[Check[Any], ...]:
    """Every check of a model, for each of the models that a run has."""
    modules = (sys.modules[__name__], megatron)
    return tuple(_check_models(check, models) for module in modules for check in functions_in(module, "run", "model"))


def _check_models(check: ModelCheck, models: Sequence[Role]) -> Check[Any]:
    @wraps(check)
    def of_all(run: Any) -> Iterator[Problem]:
        for model in models:
            if model.exists(run):
                yield from check(run, model)

    return of_all


def trained_model_is_named(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A model that every run of its kind has is a folder or a name on the hub."""
    if not model.exists_where and not model.section(run).model.path:
        hint = "give a local folder or a hub name, such as Qwen/Qwen2.5-1.5B-Instruct"
        yield Problem(path=model.at("model.path"), message="no model to train", hint=hint)


# Adapters.


def rotary_embeddings_are_given_once(run: RunConfig, model: Role) -> Iterator[Problem]:
    """`rope_scaling` and `rope_theta` of all models are not given again, with another value, for one of them."""
    basics, table = model.basics(run), model.facts(run).overrides
    own, scaling, theta = get_at(model.section(run), table), basics.rope_scaling, basics.rope_theta
    for name, value in (("rope_scaling", scaling), ("rope_theta", theta)):
        if value is not None and own.get(name, value) != value:
            yield Problem(
                path=model.at(f"{table}.{name}"),
                message=f"is not {basics.path_of(name)}, which applies to all models and would replace it",
                hint="leave one of them out",
            )


def adapter_initialization_is_supported(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Initializations that change the weights themselves or use data are not implemented, nor are Megatron's."""
    lora, path = model.section(run).model.lora, model.at("model.lora.init_method")
    if lora.rank == 0 or not model.learns:
        return
    if lora.init_method not in ("kaiming", "gaussian", "orthogonal"):
        yield Problem(
            path=path,
            message=f"{lora.init_method!r} is not implemented in this version yet",
            hint="supported: kaiming, gaussian or orthogonal",
        )
    if lora.init_method == "orthogonal" and lora.rank % 2:
        message = f"orthogonal splits the rank in two halves, and {lora.rank} is odd"
        yield Problem(path=path, message=message, hint="use an even rank, or kaiming")


def frozen_adapters_are_stored(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A model that does not learn needs a stored adapter: a new one has no effect before it is trained."""
    lora = model.section(run).model.lora
    if not model.learns and lora.rank and lora.path is None:
        yield Problem(
            path=model.at("model.lora.rank"),
            message=f"a new adapter changes no score, and the {model.title} is not trained",
            hint=f"set {model.at('model.lora.path')} to a stored adapter, or this to 0",
        )


def adapters_need_base_weights(run: RunConfig, model: Role) -> Iterator[Problem]:
    """An adapter is stored without the weights that it is for."""
    if model.section(run).model.lora.rank and model.section(run).model.init_from_scratch:
        yield Problem(
            path=model.at("model.init_from_scratch"),
            message="an adapter needs stored weights, but these are initialized at random",
            hint="set it to false, or model.lora.rank = 0",
        )


def lora_modules_are_listed(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A string is a regular expression for a module's full name, which a bare name such as `q_proj` never matches."""
    lora = model.section(run).model.lora
    if lora.rank == 0:
        return
    for field in ("target_modules", "exclude_modules"):
        value, path = getattr(lora, field), model.at(f"model.lora.{field}")
        if not isinstance(value, str) or value == "all-linear":
            continue
        if _PLAIN_NAME.fullmatch(value):
            message = f"{display_value(value)} is a regular expression for a module's full name, but matches no module"
            yield Problem(path=path, message=message, hint=f'for every module of that name, write ["{value}"]')
            continue
        try:
            re.compile(value)
        except re.error as error:
            message = f"{display_value(value)} is not a regular expression: {error}"
            yield Problem(path=path, message=message, hint="such as .*_proj, or a list of names")


# Optimizers.


def schedules_are_consistent(run: RunConfig, model: Role) -> Iterator[Problem]:
    """The settings of a learning-rate schedule do not contradict each other."""
    if not model.learns:
        return
    config = model.section(run).optimizer_config
    if config.scheduler in WITHOUT_FIELDS:
        yield Problem(
            path=model.at("optimizer_config.scheduler"),
            message=f"{config.scheduler!r} needs settings that are not implemented yet in this version",
            hint="use another, such as constant_with_warmup, linear, cosine, warmup_stable_decay or inverse_sqrt",
        )
    yield from config.problems_at(model.at("optimizer_config"))


def learning_rates_suit_fine_tuning(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A step of AdamW changes each weight by about the learning rate, and one of Muon by a fifth of it."""
    if not model.learns:
        return
    settings = model.section(run).optimizer_config
    if settings.lr == 0:
        yield warning(model.at("optimizer_config.lr"), "0 changes no weight: nothing is learned", "1e-6 is usual")
    elif settings.optimizer != "sgd" and settings.lr > LARGEST_RATE:
        message = f"each step changes every weight by about {settings.lr}"
        yield warning(model.at("optimizer_config.lr"), message, "1e-6 is usual")


def optimizer_settings_are_plausible(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A step takes lr x weight_decay of every weight away; AdamW's epsilon is far below a gradient, and its second
    moment lasts longer than its first.
    """
    if not model.learns:
        return
    settings = model.section(run).optimizer_config
    if settings.weight_decay > LARGEST_DECAY:
        message = f"each step shrinks every weight by {settings.weight_decay} times the learning rate"
        yield warning(model.at("optimizer_config.weight_decay"), message, "0.01 is usual")
    if settings.optimizer != "sgd" and settings.adam_eps > LARGEST_EPSILON:
        message = f"{settings.adam_eps} is above most gradients, so steps are smaller than lr says"
        yield warning(model.at("optimizer_config.adam_eps"), message, "1e-8 is usual")
    first, second = settings.adam_betas
    if settings.optimizer != "sgd" and second < first:
        message = f"the second moment decays faster ({second}) than the first ({first})"
        yield warning(model.at("optimizer_config.adam_betas"), message, "[0.9, 0.999] is usual")


# FSDP.


def fsdp_size_divides_ranks(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Hybrid sharding splits the ranks into groups of `fsdp_size`, each of which holds all weights."""
    ranks, size = _sharing_weights(run, model), model.section(run).fsdp_config.fsdp_size
    if _is_sharded(run, model) and size != -1 and ranks % size:
        cut = model.ranks(run) // ranks
        yield Problem(
            path=model.at("fsdp_config.fsdp_size"),
            message=f"{size} does not divide the {model.title}'s {ranks} "
            + (f"groups of {cut} ranks that cut matrices" if cut > 1 else "ranks"),
            hint=f"{nearest_divisors(nearest(size, divisors(ranks)))}; -1 takes all ranks",
        )


def reshard_degree_divides_ranks(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A number in `reshard_after_forward` splits the ranks that share one copy of the weights."""
    fsdp, ranks = model.section(run).fsdp_config, _sharing_weights(run, model)
    parts, copy = fsdp.reshard_after_forward, ranks if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    if not _is_sharded(run, model) or isinstance(parts, bool):
        return
    if ranks % copy == 0 and copy % parts:
        yield Problem(
            path=model.at("fsdp_config.reshard_after_forward"),
            message=f"{parts} does not divide the {copy} ranks that share one copy of the {model.title}'s weights "
            "(fsdp_size)",
            hint=f"{nearest_divisors(nearest(parts, divisors(copy)))}; true frees all, false none",
        )


def wrap_policy_names_classes(run: RunConfig, model: Role) -> Iterator[Problem]:
    """`wrap_policy` has one entry: the names of classes."""
    policy, path = model.section(run).fsdp_config.wrap_policy, model.at("fsdp_config.wrap_policy")
    hint = f"{WRAPPED} names classes, such as [Qwen2DecoderLayer], and is the only entry that is read"
    for name in policy:
        if name != WRAPPED:
            yield Problem(path=path, message=f"{name!r} is not a valid entry", hint=hint)
    named = policy.get(WRAPPED, ())
    if not isinstance(named, str) and not (isinstance(named, tuple) and all(isinstance(item, str) for item in named)):
        yield Problem(path=path, message=f"{WRAPPED} = {display_value(named)} names no classes", hint=hint)


# DeepSpeed.


def nvme_offload_needs_folder(run: RunConfig, model: Role) -> Iterator[Problem]:
    """`device = "nvme"` needs a folder on the drive, and DeepSpeed supports it at stage 3 only."""
    if not model.reads(run, "deepspeed_config"):
        return
    zero = model.zero(run)
    parts = {"offload_param": zero.stage == 3, "offload_optimizer": model.learns and zero.stage > 0}
    for part in (part for part, is_read in parts.items() if is_read):
        offload, path = getattr(zero, part), _zero(model, part)
        if offload.device == "nvme" and not offload.nvme_path:
            message = "device is nvme, but no folder on the drive is given"
            yield Problem(path=f"{path}.nvme_path", message=message, hint="set it to a folder on the NVMe drive")
        if offload.device == "nvme" and zero.stage < 3:
            message = f"DeepSpeed offloads to NVMe at stage 3 only, but zero_optimization.stage is {zero.stage}"
            yield Problem(path=f"{path}.device", message=message, hint="set it to cpu, or the stage to 3")


def gradient_prescaling_fits_stage(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Stages 2 and 3 scatter gradients while summing them, and can divide them only afterwards."""
    stage = model.zero(run).stage
    if _trains_by_deepspeed(run, model) and stage >= 2 and model.section(run).deepspeed_config.prescale_gradients:
        message = f"DeepSpeed cannot divide before it sums at stage {stage}"
        hint = "set it to false, or zero_optimization.stage = 0"
        yield Problem(path=model.at("deepspeed_config.prescale_gradients"), message=message, hint=hint)


def gather_buckets_are_aligned(run: RunConfig, model: Role) -> Iterator[Problem]:
    """DeepSpeed gathers an even number of elements at a time."""
    zero = model.zero(run)
    size = zero.allgather_bucket_size
    if _trains_by_deepspeed(run, model) and zero.stage in (1, 2) and size != "auto" and size % 2:
        path, message = _zero(model, "allgather_bucket_size"), f"{size} is odd, and DeepSpeed gathers pairs of elements"
        yield Problem(path=path, message=message, hint=f"such as {size + 1}")


def hpz_size_divides_ranks(run: RunConfig, model: Role) -> Iterator[Problem]:
    """`zero_hpz_partition_size` splits the ranks into groups, each of which holds all weights."""
    zero, ranks = model.zero(run), model.ranks(run)
    size = zero.zero_hpz_partition_size
    if _trains_by_deepspeed(run, model) and zero.stage == 3 and ranks > 1 and ranks % size:
        yield Problem(
            path=_zero(model, "zero_hpz_partition_size"),
            message=f"{size} does not divide the {model.title}'s {ranks} ranks",
            hint=nearest_divisors(nearest(size, divisors(ranks))),
        )


def zero_groups_exclude_tensor_parallel(run: RunConfig, model: Role) -> Iterator[Problem]:
    """DeepSpeed forms the groups of hpZ and qgZ from consecutive ranks. With tensor parallelism, these hold different
    parts of a matrix, which it would silently mix up.
    """
    cutting: int = getattr(model.section(run), "tensor_parallel_size", 1)
    zero = model.zero(run)
    if cutting == 1 or zero.stage != 3 or not model.reads(run, "deepspeed_config"):
        return
    for field, off, on in (
        ("zero_hpz_partition_size", 1, zero.zero_hpz_partition_size > 1),
        ("zero_quantized_gradients", "false", zero.zero_quantized_gradients and model.learns),
    ):
        if on:
            yield Problem(
                path=_zero(model, field),
                message=f"DeepSpeed groups consecutive ranks for it, and {cutting} of them cut matrices",
                hint=f"set it to {off}, or {model.at('tensor_parallel_size')} = 1",
            )


def deepspeed_quantization_needs_cuda(run: RunConfig, model: Role) -> Iterator[Problem]:
    """DeepSpeed's quantization kernels need CUDA."""
    if not model.reads(run, "deepspeed_config") or model.zero(run).stage != 3 or model.on_cuda(run):
        return
    for name in ("zero_quantized_weights", *(["zero_quantized_gradients"] if model.learns else [])):
        if getattr(model.zero(run), name):
            yield Problem(path=_zero(model, name), message="needs the device cuda", hint="set it to false")


def muon_needs_whole_matrices(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Muon orthogonalizes whole matrices, but ZeRO updates flat pieces of several weights."""
    if _trains_by_deepspeed(run, model) and model.section(run).optimizer_config.optimizer == "muon":
        yield Problem(
            path=model.at("optimizer_config.optimizer"),
            message="muon needs whole matrices, and DeepSpeed gives its optimizer flat pieces of several weights",
            hint="use adamw, or strategy = fsdp2",
        )


def cpu_adam_needs_cpu_state(run: RunConfig, model: Role) -> Iterator[Problem]:
    """DeepSpeed's CPUAdam needs weights and state in CPU memory, where offloading at stages 1 to 3 puts them."""
    if not model.learns or model.section(run).optimizer_config.optimizer != "cpu_adamw":
        return
    zero = model.zero(run)
    if not model.reads(run, "deepspeed_config") or zero.stage == 0 or zero.offload_optimizer.device != "cpu":
        yield Problem(
            path=model.at("optimizer_config.optimizer"),
            message="cpu_adamw steps optimizer state that DeepSpeed keeps in CPU memory; this run keeps it elsewhere",
            hint="use adamw; or set strategy = deepspeed, and in zero_optimization stage to 1, 2 or 3 and "
            "offload_optimizer.device = cpu",
        )


# Ranks that share sequences, matrices or experts. Whether the sizes divide the model is checked in
# `skyrl.experiments.model_checks`, which reads its files.


def sequence_parallel_needs_packing(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Ranks share the row that rows are packed into; padded rows would be cut into stretches of padding."""
    basics = model.basics(run)
    if not basics.use_sample_packing:
        hint = f"set {basics.path_of('use_sample_packing')} = true"
        for path, size in _sharing_sequences(run, model):
            message = f"{size} ranks can share a sequence only if rows are packed"
            yield Problem(path=path, message=message, hint=hint)


def sequence_parallel_needs_torch_attention(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Ranks that share sequences use torch's own attention kernels, which on CUDA are those of FlashAttention."""
    basics = model.basics(run)
    if basics.attention not in (None, "sdpa") and not model.facts(run).own_modules:
        field = basics.path_of("attention")
        for path, size in _sharing_sequences(run, model):
            message = f"{size} ranks cannot share a sequence while {field} is {basics.attention}"
            hint = f"set {field} = sdpa, which uses torch's FlashAttention kernels on CUDA"
            yield Problem(path=path, message=message, hint=hint)


def dropout_has_its_switch(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A learner drops nothing, whatever its model's configuration says, unless it is asked to."""
    if not model.learns or model.section(run).use_dropout:
        return
    table = model.facts(run).overrides
    for name, value in get_at(model.section(run), table).items():
        if sets_dropout(name, value):
            yield warning(
                path=f"{model.at(table)}.{name}",
                message=f"has no effect: {model.at('use_dropout')} is false",
                hint=f"set {model.at('use_dropout')} to true, or leave this out",
            )


def gathered_attention_has_no_dropout(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Attention in blocks of gathered keys has no dropout."""
    size = model.section(run).context_parallel_size
    if model.learns and model.section(run).use_dropout and size > 1:
        yield Problem(
            path=model.at("use_dropout"),
            message=f"attention dropout does not work with context_parallel_size = {size}",
            hint=f"set it to false, or use {model.at('sequence_parallel_size')} instead",
        )


def strategy_reads_degrees(run: RunConfig, model: Role) -> Iterator[Problem]:
    """A strategy has its own fields for ranks along a dimension: Megatron's are in `megatron_config`, where a context
    size takes the place of a sequence size, and DeepSpeed has none for experts.
    """
    section, own, basics = model.section(run), model.facts(run).degrees, model.basics(run)
    for dimension in ("sequence", "context", "tensor", "expert"):
        name = f"{dimension}_parallel_size"
        size = getattr(section, name)
        if size == 1 or name in own.values():
            continue
        field = own.get("context" if dimension == "sequence" else dimension)
        instead = f"and {model.at(field)} = {size}" if field else f"or {basics.path_of('strategy')} = fsdp2"
        message = f"{size}: strategy = {basics.strategy} does not read it"
        yield Problem(path=model.at(name), message=message, hint=f"set it to 1, {instead}")


def expert_parallel_needs_fsdp(run: RunConfig, model: Role) -> Iterator[Problem]:
    """Experts are spread over all ranks of a model under FSDP, with all other matrices whole."""
    section, path, ranks = model.section(run), model.at("expert_parallel_size"), model.ranks(run)
    size = section.expert_parallel_size
    if size == 1 or not model.reads(run, "fsdp_config"):
        return
    if section.tensor_parallel_size > 1:
        message = (
            f"experts cannot be spread over {size} ranks while tensor_parallel_size = {section.tensor_parallel_size}"
        )
        yield Problem(path=path, message=message, hint="set one of them to 1")
    elif section.fsdp_config.fsdp_size not in (-1, ranks):
        message = f"experts cannot be spread over {size} ranks while a copy is sharded over only some of the ranks"
        yield Problem(path=path, message=message, hint=f"set {model.at('fsdp_config.fsdp_size')} = -1")
    elif ranks % size:
        message = f"{size} does not divide the {ranks} ranks of the model"
        yield Problem(path=path, message=message, hint=nearest_divisors(nearest(size, divisors(ranks))))


def _sharing_sequences(run: RunConfig, model: Role) -> Iterator[tuple[str, int]]:
    """Path and size of each dimension along which ranks share sequences."""
    degrees, own = model.degrees(run), model.facts(run).degrees
    for dimension in ("sequence", "context"):
        if (size := getattr(degrees, dimension)) > 1:
            yield model.at(own[dimension]), size


def _sharing_weights(run: RunConfig, model: Role) -> int:
    """Number of ranks that FSDP shards a matrix over: all ranks, or those that hold the same tensor-parallel part of
    it.
    """
    cutting: int = getattr(model.section(run), "tensor_parallel_size", 1)
    return max(model.ranks(run) // cutting, 1)


def _is_sharded(run: RunConfig, model: Role) -> bool:
    """Whether FSDP shards the model, which it does with more than one rank."""
    return model.reads(run, "fsdp_config") and model.ranks(run) > 1


def _trains_by_deepspeed(run: RunConfig, model: Role) -> bool:
    return model.learns and model.reads(run, "deepspeed_config")


def _zero(model: Role, field: str) -> str:
    return model.at(f"deepspeed_config.zero_optimization.{field}")
