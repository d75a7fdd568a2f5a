"""Settings of AReaL's training engines (FSDP, Archon, Megatron), and settings that all of its models share.

Each table has an effect only for the backend in its name: see `areal.backends.in_other_backend`.
"""

from __future__ import annotations

from collections.abc import Iterable

from skyrl.interop.areal.backends import MODELS, trains_in_halves
from skyrl.interop.areal.defaults import has_reference
from skyrl.interop.areal.keys import LOSS_SCALING, switch
from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    Entry,
    Translation,
    Values,
    fixed,
    maps_to,
    missing,
    numeric,
    redundant,
    unsupported,
    when_on,
)

_CALLS = "used by AReaL's controllers to reach its processes; skyrl uses Ray, which has its own token"
_FP8 = "FP8 training"
_PER_LAYER = "per-layer optimizer steps on the GPU with the optimizer state on the host"
_TURNS = "models that share GPUs take turns and free their memory in between"
_FILES = "weights are always read and written in Hugging Face format"
_HALF_IN_MEGATRON = "float16 training with Megatron"
_CHUNKS = "log-probabilities are computed in chunks, whose size does not affect results"
_UNSENT = "only the policy's weights are sent to engines"
_DELTA = "AReaL's own transfer of changed weights (weight_sync_backend = delta is the one here)"

HALF = ("float16", "fp16", "half")
"""AReaL's spellings of float16."""

_NO_ADAPTER = "the reference model has no adapter: a new one would not change its outputs"


def precision(key: str, value: object, values: Values) -> Translation:
    """Convert the compute dtype: `actor.dtype`, of which the other models have copies."""
    if value in HALF and not trains_in_halves(values):
        return unsupported(_HALF_IN_MEGATRON)
    models = ["actor", *(["ref"] if has_reference(values) else []), *(["critic"] if "critic.path" in values else [])]
    return computed_in(value, "trainer.bf16", [f"trainer.{MODELS[model]}.fsdp_config." for model in models])


def computed_in(value: object, bf16: str, tables: Iterable[str]) -> Translation:
    """The compute dtype at our paths: the field with the path `bf16`, and FSDP's tables for float16."""
    if value in HALF:
        return Translation(writes={f"{table}mixed_precision.param_dtype": "float16" for table in tables})
    return Translation(writes={bf16: value in ("bfloat16", "bf16")})


def loss_scaling(key: str, value: object, values: Values) -> Translation | None:
    """Convert a setting of loss scaling, which has an effect only in float16; None for any other key. `model` is the
    model of a supervised run.
    """
    owner, _, rest = key.partition(".")
    name = rest.removeprefix("optimizer.")
    if owner not in (*MODELS, "model") or name not in LOSS_SCALING or values.get(f"{owner}.dtype") not in HALF:
        return None
    if not trains_in_halves(values):
        return unsupported(_HALF_IN_MEGATRON)
    table = "" if owner == "model" else f"trainer.{MODELS[owner]}."
    return Translation(writes={f"{table}optimizer_config.{name}": value})


def _checkpointing(value: object) -> Translation:
    """Convert Archon's `ac_mode`; activation checkpointing is all or nothing here."""
    if value == "memory_budget":
        return unsupported("activation checkpointing within a memory budget")
    note = "every layer is recomputed in full" if value == "selective" else ""
    return Translation(writes={"trainer.gradient_checkpointing": value != "none"}, note=note)


def _attention(value: object) -> Translation:
    if value == "tree":
        return unsupported("tree training over shared prefixes")
    if value == "varlen":
        return redundant("packed rows always attend only to themselves")
    return Translation(writes={"trainer.attention": value})


def _model_entries(source: str, target: str) -> dict[str, Entry]:
    """Entries for FSDP and the adapter of one model."""
    fsdp, lora = f"trainer.{target}.fsdp_config.", f"trainer.{target}.model.lora."
    wrapped = "wrap_policy.transformer_layer_cls_to_wrap"
    return {
        f"{source}.fsdp.offload_params": f"{fsdp}cpu_offload",
        f"{source}.fsdp.{wrapped}": f"{fsdp}{wrapped}",
        f"{source}.fsdp.wrap_policy": missing("a value for a whole table; set its fields instead"),
        f"{source}.peft_type": fixed("lora", does="adapters are always LoRA", otherwise="adapters other than LoRA"),
        f"{source}.lora_rank": f"{lora}rank",
        f"{source}.lora_alpha": f"{lora}alpha",
        f"{source}.target_modules": lambda value: Translation(
            writes={f"{lora}target_modules": "all-linear" if value in (["all-linear"], [], None) else value}
        ),
    }


def _megatron(ours: str) -> dict[str, Entry]:
    """Entries for Megatron's options, with our table at the path `ours`: `trainer.policy.megatron_config`."""
    table = f"trainer.{ours}.megatron_config."
    transformer, optimizer, ddp = (f"{table}{name}." for name in (
        "transformer_config_kwargs", "optimizer_config_kwargs", "ddp_config",
    ))  # fmt: skip
    return {
        **{f"ddp.{name}": ddp + name for name in (
            "grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective",
        )},
        "ddp.use_distributed_optimizer": fixed(
            True, does="always on", otherwise="a full optimizer state on every rank"
        ),
        "ddp.check_for_nan_in_grad": redundant("non-finite gradients are always detected: trainer.faults"),
        **{name: transformer + name for name in (
            "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
            "distribute_saved_activations", "moe_router_dtype", "moe_shared_expert_overlap", "moe_permute_fusion",
            "moe_router_fusion", "moe_router_bias_update_rate", "moe_z_loss_coeff", "cross_entropy_loss_fusion",
        )},
        **{name: optimizer + name for name in (
            "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype",
            "exp_avg_sq_dtype", "overlap_param_gather_with_optimizer_step",
        )},
        "moe_token_dispatcher_type": f"{table}moe_token_dispatcher_type",
        "async_save": "trainer.async_ckpt_save",
        "use_deterministic_algorithms": switch("trainer.deterministic", off="off by default"),
        "use_checkpoint_opt_param_scheduler": fixed(
            True, does="a resumed run continues its schedule", otherwise="resuming with a different schedule"
        ),
        "wrap_with_ddp": fixed(True, does="always on", otherwise="Megatron without DDP"),
        "use_torch_fsdp2": missing("FSDP2 within Megatron (trainer.strategy = fsdp2 works without Megatron)", False),
        "use_custom_fsdp": missing("FSDP within Megatron (trainer.strategy = fsdp2 works without Megatron)", False),
        "bridge_type": redundant(_FILES),
        "use_mbridge_save": redundant(_FILES),
        "fp8_config": missing(_FP8),
        "fp8_config.*": missing(_FP8, False),
        "ddp.fp8_param_gather": missing(_FP8, False),
        "ddp.align_param_gather": missing("aligned all-gathers of Megatron's parameters", False),
        "ddp.bucket_size": missing("a size for Megatron's buckets of gradients"),
        "moe_enable_deepep": missing("DeepEP for the exchange of tokens between experts", False),
        "virtual_pipeline_parallel_size": missing("interleaved pipeline stages", 1),
        "enable_mtp": missing("training of the layers that predict several tokens", False),
        "enable_fp32_lm_head": when_on("trainer.fp32_lm_head", True),
        **dict.fromkeys(("enable_chunked_logits", "lm_head_loss_chunk_size"), redundant(_CHUNKS)),
        "entropy_requires_grad": redundant("AReaL's losses detach the entropy"),  # areal/trainer/ppo/actor.py:555
        "disable_grad_buffers_cpu_backup": redundant(_TURNS),
        "use_bridge_for_update_weights": redundant(_FILES),
        "*": missing("this Megatron option", False),
    }  # fmt: skip


_ARCHON: dict[str, Entry] = {
    "attn_type": _attention,
    "offload_params": "trainer.policy.fsdp_config.cpu_offload",
    "enable_compile": when_on(
        "trainer.policy.use_torch_compile", True, note="only log-probabilities are compiled, not layers"
    ),
    "ac_mode": _checkpointing,
    "selective_ac_option": redundant("every layer is recomputed in full, or none is"),
    "ac_memory_budget": redundant("only used with ac_mode = memory_budget, which is not implemented"),
    "ac_preserve_rng_state": redundant(
        "random numbers depend only on trainer.seed and the step, even when a layer is recomputed"
    ),
    "ac_debug": missing("debug output of activation checkpointing", False),
    "pp_*": redundant("no effect: an archon backend with pipeline stages is refused"),
    "reshard_after_forward_policy": maps_to(
        "trainer.policy.fsdp_config.reshard_after_forward", convert=lambda value: value != "never"
    ),
    "use_deterministic_algorithms": switch("trainer.deterministic", off="off by default"),
    "fp8_config.mode": missing(_FP8, "disabled"),
    "fp8_config.*": missing(_FP8, False),
}


def _cap_mode(mode: object) -> Translation:
    """Convert the cap mode, which AReaL had early in 2026, before `rejection_sampling`."""
    if isinstance(mode, str) and (ours := {"token_mask": "mask", "token_truncate": "clamp"}.get(mode)):
        return Translation(writes={ALGORITHM + "decoupled.cap_mode": ours})
    return unsupported(
        "the decoupled loss without importance weights" if mode == "disabled" else "sequence-level importance weights"
    )


NEVER_READ_OF_REF = (
    "ppo_n_minibatches", "eps_clip", "eps_clip_higher", "c_clip", "m2_threshold", "reward_*", "overlong_*",
    "mask_no_eos_with_zero", "discount", "gae_*", "adv_norm*", "kl_ctl", "kl_estimator", "use_sapo_loss", "sapo_tau_*",
    "use_cispo_loss", "recompute_logprob", "use_decoupled_loss", "rejection_sampling*", "importance_sampling_level",
    "prox_logp_method", "log_agent_stats*", "max_new_tokens", "behav*", "dynamic_sampling", "group_*",
)  # fmt: skip
"""Settings of an actor that a reference model has as well, since both have the same class."""

_DELTA_KEYS = ("enable_delta_weight_update", "weight_update_delta_method", "weight_update_anchor_interval")

LEARNER_KEYS: dict[str, Entry] = {
    # the decoupled objective and weights
    "actor.m2_threshold": missing("M2PO, which limits the second moment of the ratios"),
    "actor.behave_imp_weight_cap": numeric(ALGORITHM + "decoupled.behav_imp_weight_cap"),
    "actor.behave_imp_weight_mode": _cap_mode,
    "actor.rejection_sampling": missing("a value for a whole table; set its fields instead"),
    "actor.rejection_sampling.level": fixed("token", does="rejection is per token", otherwise="rejection per sequence"),
    "actor.rejection_sampling.action": ALGORITHM + "decoupled.cap_mode",
    "actor.rejection_sampling.metric": fixed(
        "ratio", does="limits apply to ratios", otherwise="limits on KL divergence"
    ),
    "actor.rejection_sampling.agg": redundant("rejection is per token, so nothing is aggregated"),
    "actor.rejection_sampling.upper": numeric(ALGORITHM + "decoupled.behav_imp_weight_cap"),
    "actor.rejection_sampling.lower": missing("a lower limit on ratios in the decoupled loss"),
    "actor.enable_tree_training": missing("tree training over shared prefixes", False),
    "actor.weight_update_mode": lambda value: (
        Translation(writes={ENGINE + "weight_sync_backend": "disk"})
        if value == "disk"
        else redundant("weights are transferred from GPU to GPU")
    ),
    # models
    **{key: entry for source, target in MODELS.items() for key, entry in _model_entries(source, target).items()},
    "*.fsdp.memory_efficient_load": redundant("each rank holds only its shard of the weights"),
    "*.fsdp.per_layer_optim_step": missing(_PER_LAYER, False),
    "*.fsdp.optim_step_prefetch_layers": missing(_PER_LAYER),
    "*.fsdp.shard_vision_across_sp": missing("vision models", False),
    **{f"{model}.megatron.{name}": entry for model, ours in MODELS.items() for name, entry in _megatron(ours).items()},
    **{f"actor.archon.{name}": entry for name, entry in _ARCHON.items()},
    "ref.archon.*": redundant("set by the policy's settings"),
    "critic.archon.*": redundant("set by the policy's settings"),
    "critic.grad_reduce_dtype": "trainer.critic.fsdp_config.mixed_precision.reduce_dtype",
    "critic.dtype": redundant("one setting for all models: trainer.bf16"),
    "critic.attn_impl": redundant("one setting for all models: trainer.attention"),
    "critic.gradient_checkpointing": "trainer.gradient_checkpointing",
    "critic.temperature": redundant("temperature does not apply to values"),
    # The reference model only computes log-probabilities: areal/trainer/rl_trainer.py:205 and 733.
    **{f"ref.{name}": redundant("the reference model only scores: it has no loss") for name in NEVER_READ_OF_REF},
    **{f"{model}.{name}": redundant(_UNSENT) for model in ("ref", "critic") for name in _DELTA_KEYS},
    "*.enable_delta_weight_update": missing(_DELTA, False),
    **{f"*.{name}": missing(_DELTA) for name in _DELTA_KEYS[1:]},
    "ref.optimizer_dtype": redundant("the reference model has no optimizer"),
    "*.optimizer_dtype": fixed(
        "float32", does="the optimizer's parameters are float32", otherwise="an optimizer with parameters in bfloat16"
    ),
    "*.logprobs_chunk_size": redundant(_CHUNKS),
    "*.workers_ready_timeout": redundant("one limit for all processes: trainer.placement.start_timeout_seconds"),
    "ref.temperature": redundant("samples are scored at their sampling temperature"),
    "ref.gradient_checkpointing": redundant("the reference model has no gradients"),
    "ref.weight_update_mode": redundant("the reference model's weights are not sent to engines"),
    "critic.weight_update_mode": redundant("the critic's weights are not sent to engines"),
    **{f"ref.{name}": redundant(_NO_ADAPTER) for name in ("use_lora", "lora_*", "target_modules", "peft_type")},
    "ref.enable_tree_training": redundant("the reference model is not trained"),
    "critic.enable_tree_training": missing("tree training over shared prefixes", False),
    "*.offload": redundant(_TURNS),
    "enable_offload": redundant(_TURNS),
    "*.use_kernels": missing("kernels from the Hugging Face Hub", False),
    "*._version": redundant(_CALLS),
    "*.admin_api_key": redundant(_CALLS),
    "*.log_level": redundant("each process has a log file under trainer.log_path"),
    "*.mb_spec.n_mbs_divisor": redundant("the composition of micro-batches does not affect results"),
    "*.mb_spec.packing_algorithm": redundant("the composition of micro-batches does not affect results"),
}
"""Keys in the form of `areal.keys.KEYS`, looked up before them."""

ONE_LIMIT = {
    "request_timeout": "trainer.placement.call_timeout_seconds",
    "setup_timeout": "trainer.placement.start_timeout_seconds",
}
"""Limits that AReaL has for each engine separately; here there is one, set to the largest."""
