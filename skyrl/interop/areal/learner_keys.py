"""Settings of AReaL's training engines (FSDP, Archon, Megatron), and settings that all of its models share.

Each table has an effect only for the backend in its name: see `areal_backends.read_by`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from skyrl.interop.areal.backends import trains_in_halves
from skyrl.interop.areal.defaults import has_reference
from skyrl.interop.conversions import LOSS_SCALING, Becomes, Entry, goes_to, later, not_there, only, switches_on

_CALLS = "used by AReaL's controllers to reach its processes; skyrl uses Ray, which has its own token"
_LOGS = "each process has a log file under trainer.log_path"
_FP8 = "FP8 training"
_TURNS = "models that share GPUs take turns and free their memory in between"
_FILES = "weights are always read and written in Hugging Face format"
_HALF_IN_MEGATRON = "float16 training with Megatron"
_MEGATRON = "this Megatron option"

HALF = ("float16", "fp16", "half")
"""AReaL's spellings of float16."""

NO_ADAPTER = "the reference model has no adapter: a new one would not change its outputs"

MODELS: Mapping[str, str] = {"actor": "policy", "ref": "ref", "critic": "critic"}
"""AReaL's name of a model -> ours."""


def precision(value: object, values: Mapping[str, Any]) -> Becomes:
    """Convert the compute dtype: `actor.dtype`, of which the other models have copies."""
    if value in HALF and not trains_in_halves("actor", values):
        return Becomes(not_yet=_HALF_IN_MEGATRON)
    there = ["actor", *(["ref"] if has_reference(values) else []), *(["critic"] if "critic.path" in values else [])]
    return computed_in(value, "trainer.bf16", [f"trainer.{MODELS[model]}.fsdp_config." for model in there])


def computed_in(value: object, bf16: str, tables: Iterable[str]) -> Becomes:
    """The compute dtype at our paths: the field with the path `bf16`, and FSDP's tables for float16."""
    if value in HALF:
        return Becomes(writes={f"{table}mixed_precision.param_dtype": "float16" for table in tables})
    return Becomes(writes={bf16: value in ("bfloat16", "bf16")})


def loss_scaling(key: str, value: object, values: Mapping[str, Any]) -> Becomes | None:
    """Convert a setting of loss scaling, which has an effect only in float16; None for any other key. `model` is the
    model of a supervised run.
    """
    owner, _, rest = key.partition(".")
    name = rest.removeprefix("optimizer.")
    if owner not in (*MODELS, "model") or name not in LOSS_SCALING or values.get(f"{owner}.dtype") not in HALF:
        return None
    if not trains_in_halves("actor", values):
        return Becomes(not_yet=_HALF_IN_MEGATRON)
    table = "" if owner == "model" else f"trainer.{MODELS[owner]}."
    return Becomes(writes={f"{table}optimizer_config.{name}": value})


def _checkpointing(value: object) -> Becomes:
    """Convert Archon's `ac_mode`; activation checkpointing is all or nothing here."""
    if value == "memory_budget":
        return Becomes(not_yet="activation checkpointing within a memory budget")
    note = "every layer is recomputed in full" if value == "selective" else ""
    return Becomes(writes={"trainer.gradient_checkpointing": value != "none"}, note=note)


def _attention(value: object) -> Becomes:
    if value == "tree":
        return Becomes(not_yet="tree training over shared prefixes")
    if value == "varlen":
        return Becomes(needless="packed rows always attend only to themselves")
    return Becomes(writes={"trainer.attention": value})


def _compiled(value: object) -> Becomes:
    if not value:
        return Becomes(needless="off")
    return Becomes(
        writes={"trainer.policy.use_torch_compile": True}, note="only log-probabilities are compiled, not layers"
    )


def _modules(path: str) -> Callable[[Any], Becomes]:
    return lambda value: Becomes(writes={path: "all-linear" if value in (["all-linear"], [], None) else value})


def _of_model(theirs: str, ours: str) -> dict[str, Entry]:
    """Entries for FSDP and the adapter of one model."""
    fsdp, lora = f"trainer.{ours}.fsdp_config.", f"trainer.{ours}.model.lora."
    wrapped = "wrap_policy.transformer_layer_cls_to_wrap"
    return {
        f"{theirs}.fsdp.offload_params": goes_to(f"{fsdp}cpu_offload"),
        f"{theirs}.fsdp.{wrapped}": goes_to(f"{fsdp}{wrapped}"),
        f"{theirs}.fsdp.wrap_policy": later("a value for a whole table; set its fields instead"),
        f"{theirs}.peft_type": only("lora", does="adapters are always LoRA", otherwise="adapters other than LoRA"),
        f"{theirs}.lora_rank": goes_to(f"{lora}rank"),
        f"{theirs}.lora_alpha": goes_to(f"{lora}alpha"),
        f"{theirs}.target_modules": _modules(f"{lora}target_modules"),
    }


def _megatron(ours: str) -> dict[str, Entry]:
    """Entries for Megatron's options, with our table at the path `ours`: `trainer.policy.megatron_config`."""
    table = f"trainer.{ours}.megatron_config."
    transformer, optimizer, ddp = (f"{table}{name}." for name in (
        "transformer_config_kwargs", "optimizer_config_kwargs", "ddp_config",
    ))  # fmt: skip
    return {
        **{f"ddp.{name}": goes_to(ddp + name) for name in (
            "grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective",
        )},
        "ddp.use_distributed_optimizer": only(True, does="always on", otherwise="a full optimizer state on every rank"),
        "ddp.check_for_nan_in_grad": not_there("non-finite gradients are always detected: trainer.faults"),
        **{name: goes_to(transformer + name) for name in (
            "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
            "distribute_saved_activations", "moe_router_dtype", "moe_shared_expert_overlap", "moe_permute_fusion",
        )},
        **{name: goes_to(optimizer + name) for name in (
            "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype",
            "exp_avg_sq_dtype", "overlap_param_gather_with_optimizer_step",
        )},
        "moe_token_dispatcher_type": goes_to(f"{table}moe_token_dispatcher_type"),
        "async_save": goes_to("trainer.async_ckpt_save"),
        "use_deterministic_algorithms": switches_on("trainer.deterministic", off="off by default"),
        "use_checkpoint_opt_param_scheduler": only(
            True, does="a resumed run continues its schedule", otherwise="resuming with a different schedule"
        ),
        "wrap_with_ddp": only(True, does="always on", otherwise="Megatron without DDP"),
        "use_torch_fsdp2": later("FSDP2 within Megatron (trainer.strategy = fsdp2 works without Megatron)", False),
        "use_custom_fsdp": later("FSDP within Megatron (trainer.strategy = fsdp2 works without Megatron)", False),
        "bridge_type": not_there(_FILES),
        "use_mbridge_save": not_there(_FILES),
        "fp8_config.mode": later(_FP8),
        "fp8_config.*": later(_FP8, False),
        "*": later(_MEGATRON, False),
    }  # fmt: skip


_ARCHON: dict[str, Entry] = {
    "attn_type": _attention,
    "offload_params": goes_to("trainer.policy.fsdp_config.cpu_offload"),
    "enable_compile": _compiled,
    "ac_mode": _checkpointing,
    "selective_ac_option": not_there("every layer is recomputed in full, or none is"),
    "ac_memory_budget": not_there("only used with ac_mode = memory_budget, which is not implemented"),
    "ac_preserve_rng_state": not_there(
        "random numbers depend only on trainer.seed and the step, even when a layer is recomputed"
    ),
    "ac_debug": later("debug output of activation checkpointing", False),
    "pp_*": not_there("no effect: an archon backend with pipeline stages is refused"),
    "reshard_after_forward_policy": goes_to(
        "trainer.policy.fsdp_config.reshard_after_forward", convert=lambda value: value != "never"
    ),
    "use_deterministic_algorithms": switches_on("trainer.deterministic", off="off by default"),
    "moe_router_dtype": later("MoE routers in float32"),
    "fp8_config.mode": later(_FP8, "disabled"),
    "fp8_config.*": not_there("only used with fp8_config.mode, which is not implemented"),
}

LEARNER_KEYS: dict[str, Entry] = {
    **{key: entry for theirs, ours in MODELS.items() for key, entry in _of_model(theirs, ours).items()},
    "*.fsdp.memory_efficient_load": not_there("each rank holds only its shard of the weights"),
    "*.fsdp.per_layer_optim_step": later(
        "per-layer optimizer steps on the GPU with the optimizer state on the host", False
    ),
    "*.fsdp.optim_step_prefetch_layers": not_there("only used with per_layer_optim_step, which is not implemented"),
    "*.fsdp.shard_vision_across_sp": later("vision models", False),
    **{f"actor.megatron.{name}": entry for name, entry in _megatron("policy").items()},
    **{f"ref.megatron.{name}": entry for name, entry in _megatron("ref").items()},
    **{f"critic.megatron.{name}": entry for name, entry in _megatron("critic").items()},
    **{f"actor.archon.{name}": entry for name, entry in _ARCHON.items()},
    "ref.archon.*": not_there("set by the policy's settings"),
    "critic.archon.*": not_there("set by the policy's settings"),
    "critic.grad_reduce_dtype": goes_to("trainer.critic.fsdp_config.mixed_precision.reduce_dtype"),
    "critic.dtype": not_there("one setting for all models: trainer.bf16"),
    "critic.attn_impl": not_there("one setting for all models: trainer.attention"),
    "critic.gradient_checkpointing": goes_to("trainer.gradient_checkpointing"),
    "critic.temperature": not_there("temperature does not apply to values"),
    "ref.temperature": not_there("samples are scored at their sampling temperature"),
    "ref.gradient_checkpointing": not_there("the reference model has no gradients"),
    "ref.weight_update_mode": not_there("the reference model's weights are not sent to engines"),
    "critic.weight_update_mode": not_there("the critic's weights are not sent to engines"),
    "ref.use_lora": not_there(NO_ADAPTER),
    "ref.enable_tree_training": not_there("the reference model is not trained"),
    "critic.enable_tree_training": later("tree training over shared prefixes", False),
    "*.offload": not_there(_TURNS),
    "enable_offload": not_there(_TURNS),
    "*.use_kernels": later("kernels from the Hugging Face Hub", False),
    "*._version": not_there(_CALLS),
    "*.admin_api_key": not_there(_CALLS),
    "*.log_level": not_there(_LOGS),
    "*.mb_spec.n_mbs_divisor": not_there("the composition of micro-batches does not affect results"),
    "*.mb_spec.packing_algorithm": not_there("the composition of micro-batches does not affect results"),
}
"""Keys in the form of `areal_keys.KEYS`, looked up before them."""

ONE_LIMIT = {
    "request_timeout": "trainer.placement.call_timeout_seconds",
    "setup_timeout": "trainer.placement.start_timeout_seconds",
}
"""Limits that AReaL has for each engine separately; here there is one, set to the largest."""
