"""Conditions under which the settings of a model have an effect: adapter, optimizer, and sharding by strategy.

They are the same for every model of every kind of run, so each function here takes a `Role`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from skyrl.config.derive.model_tables import Role
from skyrl.config.settings.deepspeed import OffloadConfig
from skyrl.config.settings.learners import DECAYING, OURS, OptimizerConfig
from skyrl.config.settings.models import SkyRLLoraConfig
from skyrl.config.settings.strategies import STRATEGIES
from skyrl.tree.classes import fields_of
from skyrl.tree.rules import Condition, Effect, all_of, effects, fields_in


def effect_where(path: str, *conditions: Condition) -> Effect:
    """The field has an effect if all conditions hold."""
    return Effect(path, all_of(*conditions))


def never(words: str) -> Condition:
    """A condition that no run of this version meets."""
    return Condition(words, lambda run: False)


def model_effects(model: Role) -> tuple[Effect, ...]:
    """Conditions under which the fields of a model's table act."""
    learning = tuple(_optimizer(model)) if model.learns else ()
    return (*_adapter(model), *learning, *_fsdp(model), *_deepspeed(model), *_megatron(model))


def exists(model: Role) -> list[Condition]:
    """The condition under which a run has the model; empty if every run has it."""
    return [Condition(model.exists_where, model.exists)] if model.exists_where else []


def _several_ranks(model: Role) -> Condition:
    return Condition(f"the {model.title} has several ranks", lambda run: model.ranks(run) > 1)


def _cuda_condition(model: Role) -> Condition:
    return Condition("the device is cuda", model.on_cuda)


def _existence_effect(model: Role, table: str) -> Iterator[Effect]:
    if model.exists_where:
        yield effect_where(model.at(table), *exists(model))


def _gradients(model: Role) -> list[Condition]:
    """Conditions of a field about gradients or the optimizer; none for a model that learns."""
    return [] if model.learns else [never(f"the model learns, which a {model.title} does not")]


# Adapters and optimizers.


def _adapter(model: Role) -> Iterator[Effect]:
    adapts = _adapts(model)
    is_new = Condition("lora.path is none", lambda run: model.section(run).model.lora.path is None)
    more = {"init_method": [is_new], "dropout": []}
    yield from _existence_effect(model, "model.lora")
    for name in fields_of(SkyRLLoraConfig):
        if name not in ("rank", "lora_sync_path"):
            learning = [*more[name], *_gradients(model)] if name in more else []
            yield effect_where(model.at(f"model.lora.{name}"), adapts, *learning)
    if model.title != "policy" or not model.at("x").startswith("trainer."):
        yield effect_where(model.at("model.lora.lora_sync_path"), never("engines sample from the adapted model"))


def _adapts(model: Role) -> Condition:
    return Condition("lora.rank is above 0", lambda run: model.section(run).model.lora.rank > 0)


def _optimizer(model: Role) -> Iterator[Effect]:
    path = model.at("optimizer_config")

    def rule(run: Any) -> str:
        name: str = model.section(run).optimizer_config.optimizer
        return name

    yield from _existence_effect(model, "optimizer_config")
    decays = Condition("weight_decay is above 0", lambda run: model.section(run).optimizer_config.weight_decay > 0)
    yield effect_where(f"{path}.weight_decay_on", decays)
    by_adam = Condition("optimizer is adamw, cpu_adamw or muon", lambda run: rule(run) != "sgd")
    yield from (effect_where(f"{path}.{name}", by_adam) for name in ("adam_betas", "adam_eps"))
    yield effect_where(f"{path}.muon_momentum", Condition("optimizer is muon", lambda run: rule(run) == "muon"))
    in_half = Condition("fsdp_config.mixed_precision names float16", lambda run: _is_in_half(model, run))
    for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        yield effect_where(f"{path}.{name}", in_half)
    yield from _schedule_reads(path, lambda run: model.section(run).optimizer_config, model.optimizer_steps)


def _is_in_half(model: Role, run: Any) -> bool:
    """Whether gradients are in float16 at some point."""
    precision = model.section(run).fsdp_config.mixed_precision
    if precision is None or not model.reads(run, "fsdp_config"):
        return False
    read = (precision.param_dtype, precision.reduce_dtype) if model.ranks(run) > 1 else (precision.param_dtype,)
    return any(item in ("fp16", "float16") for item in read)


def _strategy_is(model: Role, name: str) -> Condition:
    """The condition of a table that one strategy reads."""
    table = STRATEGIES[name].table
    return Condition(f"the strategy is {name}", lambda run: model.reads(run, table))


# FSDP.


def _fsdp(model: Role) -> Iterator[Effect]:
    fsdp, several = _strategy_is(model, "fsdp2"), _several_ranks(model)
    path = model.at("fsdp_config")
    yield effect_where(path, *exists(model), fsdp)
    yield effect_where(f"{path}.cpu_offload", several, _cuda_condition(model))
    for name in ("reshard_after_forward", "fsdp_size", "wrap_policy"):
        yield effect_where(f"{path}.{name}", several)
    yield effect_where(f"{path}.mixed_precision.reduce_dtype", several, *_gradients(model))


# DeepSpeed.


@frozen(kw_only=True)
class _ZeroField:
    """Facts about a field of ZeRO."""

    stages: tuple[int, ...] = (3,)
    """Stages that read it."""

    gradients: bool = False
    """Whether it concerns gradients or the optimizer, which a reference does not have."""

    several: bool = False
    """Whether it concerns traffic between ranks."""


_ZERO: dict[str, _ZeroField] = {
    "zero_hpz_partition_size": _ZeroField(gradients=True, several=True),
    "zero_quantized_weights": _ZeroField(),
    "zero_quantized_gradients": _ZeroField(gradients=True),
    "round_robin_gradients": _ZeroField(stages=(1, 2), gradients=True, several=True),
    "reduce_bucket_size": _ZeroField(stages=(1, 2, 3), gradients=True),
    "allgather_bucket_size": _ZeroField(stages=(1, 2), gradients=True, several=True),
    "sub_group_size": _ZeroField(gradients=True),
    "stage3_max_live_parameters": _ZeroField(),
    "stage3_max_reuse_distance": _ZeroField(),
    "stage3_prefetch_bucket_size": _ZeroField(),
    "stage3_param_persistence_threshold": _ZeroField(),
}
"""Fields of `zero_optimization` whose conditions have the same form. The conditions of the others are below."""


def _deepspeed(model: Role) -> Iterator[Effect]:
    path = model.at("deepspeed_config")
    zero = f"{path}.zero_optimization"
    yield effect_where(path, *exists(model), _strategy_is(model, "deepspeed"))
    gradients = _gradients(model)
    if gradients:
        yield effect_where(f"{path}.communication_data_type", *gradients)
        yield effect_where(f"{path}.wall_clock_breakdown", *gradients)
    yield effect_where(f"{path}.prescale_gradients", _stage_is(model, 0), *gradients)
    for name, facts in _ZERO.items():
        more = [*(gradients if facts.gradients else []), *([_several_ranks(model)] if facts.several else [])]
        yield effect_where(f"{zero}.{name}", _stage_is(model, *facts.stages), *more)
    yield effect_where(f"{zero}.overlap_comm", _overlaps(model))
    yield effect_where(f"{zero}.contiguous_gradients", _gradients_may_be_scattered(model), *gradients)
    yield effect_where(
        f"{zero}.stage3_gather_16bit_weights_on_model_save",
        never("DeepSpeed saves the model (checkpoints and exports of a run are written without it)"),
    )
    yield from _offload(model, f"{zero}.offload_param", (3,))
    yield from _offload(model, f"{zero}.offload_optimizer", (1, 2, 3), *gradients)


def _megatron(model: Role) -> Iterator[Effect]:
    path = model.at("megatron_config")
    yield effect_where(path, *exists(model), _strategy_is(model, "megatron"))
    yield effect_where(
        f"{path}.dist_ckpt_optim_fully_reshardable",
        never("a checkpoint is kept from other numbers of ranks (any number of ranks can load every checkpoint)"),
    )
    yield effect_where(f"{path}.moe_token_dispatcher_type", _has_other_experts_elsewhere(model))
    gradients = _gradients(model)
    of_learning = ("ddp_config", "torch_profiler_config", "optimizer_config_kwargs") if gradients else ()
    yield from (effect_where(f"{path}.{name}", *gradients) for name in of_learning)
    yield effect_where(f"{path}.empty_cuda_cache", *gradients, _cuda_condition(model))
    yield effect_where(f"{path}.lora_config", *gradients, _adapts(model))
    others = Condition("the strategy is not megatron", lambda run: model.facts(run).overrides == "model_config_kwargs")
    yield effect_where(model.at("model_config_kwargs"), *exists(model), others)


def _has_other_experts_elsewhere(model: Role) -> Condition:
    """The condition for tokens to travel between ranks: experts are on other ranks, or split among ranks."""
    words = "expert_model_parallel_size or the ranks that cut experts are above 1"
    return Condition(words, lambda run: model.degrees(run).experts > 1)


def _stage_is(model: Role, *stages: int) -> Condition:
    *most, last = map(str, stages)
    words = f"zero_optimization.stage is {', '.join(most)} or {last}" if most else f"zero_optimization.stage is {last}"
    return Condition(words, lambda run: model.zero(run).stage in stages)


def _overlaps(model: Role) -> Condition:
    """Communication overlaps: stages 1 and 2 reduce gradients during backward, and stage 3 also gathers weights on
    another CUDA stream.
    """

    def overlaps(run: Any) -> bool:
        stage = model.zero(run).stage
        return (stage in (1, 2) and model.learns) or (stage == 3 and model.on_cuda(run))

    early = "zero_optimization.stage is 1 or 2, or it is " if model.learns else "zero_optimization.stage is "
    return Condition(f"{early}3 on a cuda device", overlaps)


def _gradients_may_be_scattered(model: Role) -> Condition:
    """The condition of `contiguous_gradients`: with stages 1 and 2 and an offloaded optimizer, DeepSpeed always copies
    gradients into one buffer.
    """

    def matters(run: Any) -> bool:
        zero = model.zero(run)
        return zero.stage == 3 or (zero.stage in (1, 2) and zero.offload_optimizer.device == "none")

    return Condition(
        "zero_optimization.stage is 3, or it is 1 or 2 and the optimizer stays on the device (offload_optimizer)",
        matters,
    )


def _offload(model: Role, path: str, stages: tuple[int, ...], *more: Condition) -> Iterator[Effect]:
    def settings(run: Any) -> OffloadConfig:
        zero = model.zero(run)
        return zero.offload_param if path.endswith("offload_param") else zero.offload_optimizer

    yield effect_where(path, _stage_is(model, *stages), *more)
    yield effect_where(
        f"{path}.device",
        Condition(
            "the device is cuda (a CPU has it in its memory already), or this is nvme",
            lambda run: model.on_cuda(run) or settings(run).device == "nvme",
        ),
    )
    offloads = Condition("its device is cpu or nvme", lambda run: settings(run).device != "none")
    yield effect_where(f"{path}.pin_memory", offloads, _cuda_condition(model))
    yield effect_where(f"{path}.nvme_path", Condition("its device is nvme", lambda run: settings(run).device == "nvme"))


def _schedule_reads(
    path: str, optimizer: Callable[[Any], OptimizerConfig], updates: Callable[[Any], int]
) -> tuple[Effect, ...]:
    """Conditions under which the fields of a schedule act; `updates` are optimizer steps in one training step."""

    def when(words: str, holds: Callable[[OptimizerConfig], bool]) -> Condition:
        return Condition(words, lambda run: holds(optimizer(run)))

    decays = when(f"scheduler is one of {', '.join(DECAYING)}", lambda config: config.scheduler in DECAYING)
    is_stable = when("scheduler is warmup_stable_decay", lambda config: config.scheduler == "warmup_stable_decay")
    warms_up = when(
        "there is a warm-up, of a schedule that is not transformers' own",
        lambda config: config.scheduler in OURS and _warms_up(config),
    )
    follows_one = when("scheduler is not constant", lambda config: config.scheduler != "constant")
    several = Condition("a training step has several optimizer steps", lambda run: updates(run) > 1)
    return (
        Effect(f"{path}.min_lr_ratio", decays),
        Effect(f"{path}.num_decay_steps", is_stable),
        Effect(f"{path}.warmup_start_ratio", warms_up),
        *effects(follows_one, *fields_in(path, "num_warmup_steps warmup_steps_proportion")),
        Effect(f"{path}.schedule_unit", when("the learning rate changes", _changes) & several),
    )


def _warms_up(config: OptimizerConfig) -> bool:
    return config.scheduler != "constant" and bool(config.num_warmup_steps or config.warmup_steps_proportion)


def _changes(config: OptimizerConfig) -> bool:
    return _warms_up(config) or config.scheduler not in ("constant", "constant_with_warmup")
