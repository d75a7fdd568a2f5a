"""Conditions under which the settings of a model have an effect: adapter, optimizer, and sharding by strategy.

They are the same for every model of every kind of run, so each function here takes a `Role`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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


def _gradients(model: Role) -> list[Condition]:
    """Conditions of a field about gradients or the optimizer; none for a model that learns."""
    return [] if model.learns else [never(f"the model learns, which a {model.title} does not")]


def _adapts(model: Role) -> Condition:
    return Condition("lora.rank is above 0", lambda run: model.section(run).model.lora.rank > 0)


# Adapters and optimizers.


def _adapter(model: Role) -> Iterator[Effect]:
    adapts = _adapts(model)
    is_new = Condition("lora.path is none", lambda run: model.section(run).model.lora.path is None)
    of_learning = {"init_method": [is_new, *_gradients(model)], "dropout": _gradients(model)}
    yield from (Effect(model.at("model.lora"), existence) for existence in exists(model))
    for name in fields_of(SkyRLLoraConfig):
        if name not in ("rank", "lora_sync_path"):
            yield effect_where(model.at(f"model.lora.{name}"), adapts, *of_learning.get(name, ()))
    if model.title != "policy" or not model.at("x").startswith("trainer."):
        yield effect_where(model.at("model.lora.lora_sync_path"), never("engines sample from the adapted model"))


def _optimizer(model: Role) -> Iterator[Effect]:
    path = model.at("optimizer_config")

    def when(words: str, holds: Callable[[OptimizerConfig], bool]) -> Condition:
        return Condition(words, lambda run: holds(model.section(run).optimizer_config))

    yield from (Effect(path, existence) for existence in exists(model))
    yield Effect(f"{path}.weight_decay_on", when("weight_decay is above 0", lambda config: config.weight_decay > 0))
    by_adam = when("optimizer is adamw, cpu_adamw or muon", lambda config: config.optimizer != "sgd")
    yield from effects(by_adam, *fields_in(path, "adam_betas adam_eps"))
    yield Effect(f"{path}.muon_momentum", when("optimizer is muon", lambda config: config.optimizer == "muon"))
    in_half = Condition("fsdp_config.mixed_precision names float16", lambda run: _is_in_half(model, run))
    yield from effects(in_half, *fields_in(path, "initial_loss_scale min_loss_scale loss_scale_window hysteresis"))

    decays = when(f"scheduler is one of {', '.join(DECAYING)}", lambda config: config.scheduler in DECAYING)
    yield Effect(f"{path}.min_lr_ratio", decays)
    is_stable = when("scheduler is warmup_stable_decay", lambda config: config.scheduler == "warmup_stable_decay")
    yield Effect(f"{path}.num_decay_steps", is_stable)
    warms_up = when(
        "there is a warm-up, of a schedule that is not transformers' own",
        lambda config: config.scheduler in OURS and _warms_up(config),
    )
    yield Effect(f"{path}.warmup_start_ratio", warms_up)
    follows_one = when("scheduler is not constant", lambda config: config.scheduler != "constant")
    yield from effects(follows_one, *fields_in(path, "num_warmup_steps warmup_steps_proportion"))
    changes = when(
        "the learning rate changes",
        lambda config: _warms_up(config) or config.scheduler not in ("constant", "constant_with_warmup"),
    )
    several = Condition("a training step has several optimizer steps", lambda run: model.optimizer_steps(run) > 1)
    yield Effect(f"{path}.schedule_unit", changes & several)


def _warms_up(config: OptimizerConfig) -> bool:
    return config.scheduler != "constant" and bool(config.num_warmup_steps or config.warmup_steps_proportion)


def _is_in_half(model: Role, run: Any) -> bool:
    """Whether gradients are in float16 at some point."""
    precision = model.section(run).fsdp_config.mixed_precision
    if precision is None or not model.reads(run, "fsdp_config"):
        return False
    read = (precision.param_dtype, precision.reduce_dtype) if model.ranks(run) > 1 else (precision.param_dtype,)
    return any(item in ("fp16", "float16") for item in read)


def _strategy_is(model: Role, name: str) -> Condition:
    return Condition(f"the strategy is {name}", lambda run: model.reads(run, STRATEGIES[name].table))


# FSDP.


def _fsdp(model: Role) -> Iterator[Effect]:
    fsdp, several = _strategy_is(model, "fsdp2"), _several_ranks(model)
    path = model.at("fsdp_config")
    yield effect_where(path, *exists(model), fsdp)
    yield effect_where(f"{path}.cpu_offload", several, _cuda_condition(model))
    yield from effects(several, *fields_in(path, "reshard_after_forward fsdp_size wrap_policy"))
    yield effect_where(f"{path}.mixed_precision.reduce_dtype", several, *_gradients(model))


# DeepSpeed and Megatron.


def _deepspeed(model: Role) -> Iterator[Effect]:
    path = model.at("deepspeed_config")
    zero = f"{path}.zero_optimization"
    yield effect_where(path, *exists(model), _strategy_is(model, "deepspeed"))
    gradients, several = _gradients(model), _several_ranks(model)
    if gradients:
        yield from effects(all_of(*gradients), *fields_in(path, "communication_data_type wall_clock_breakdown"))
    yield effect_where(f"{path}.prescale_gradients", _stage_is(model, 0), *gradients)
    yield from effects(
        _stage_is(model, 3),
        *fields_in(zero, "zero_quantized_weights stage3_max_live_parameters stage3_max_reuse_distance"),
        *fields_in(zero, "stage3_prefetch_bucket_size stage3_param_persistence_threshold"),
    )
    of_learning = all_of(_stage_is(model, 3), *gradients)
    yield from effects(of_learning, *fields_in(zero, "zero_quantized_gradients sub_group_size"))
    yield effect_where(f"{zero}.zero_hpz_partition_size", _stage_is(model, 3), *gradients, several)
    of_traffic = all_of(_stage_is(model, 1, 2), *gradients, several)
    yield from effects(of_traffic, *fields_in(zero, "round_robin_gradients allgather_bucket_size"))
    yield effect_where(f"{zero}.reduce_bucket_size", _stage_is(model, 1, 2, 3), *gradients)
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
    words = "expert_model_parallel_size or the ranks that cut experts are above 1"
    yield effect_where(
        f"{path}.moe_token_dispatcher_type", Condition(words, lambda run: model.degrees(run).experts > 1)
    )
    if gradients := _gradients(model):
        of_learning = fields_in(path, "ddp_config torch_profiler_config optimizer_config_kwargs")
        yield from effects(all_of(*gradients), *of_learning)
    yield effect_where(f"{path}.empty_cuda_cache", *gradients, _cuda_condition(model))
    yield effect_where(f"{path}.lora_config", *gradients, _adapts(model))
    others = Condition("the strategy is not megatron", lambda run: model.facts(run).overrides == "model_config_kwargs")
    yield effect_where(model.at("model_config_kwargs"), *exists(model), others)


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
