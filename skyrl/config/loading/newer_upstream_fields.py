"""Fields that SkyRL added to its tree after the version that this tree follows.

Such a field is refused with the name of the capability; a value that asks for nothing, such as `enabled = false`, is
dropped with a warning.
"""

from __future__ import annotations

from typing import Any

from skyrl.tree.migrations import Migration

_ENGINE = "generator.inference_engine"
_MEGATRON = "megatron_config"

_CAPABILITIES: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    # capability: (values that ask for nothing, paths)
    "worker processes of the data loader": ((None, 0, False), ("data.dataloader",)),
    "vision-language rollouts": ((False,), ("generator.vision_language_generator",)),
    "disaggregated prefill": ((False, 0), (f"{_ENGINE}.enable_pd", f"{_ENGINE}.num_prefill")),
    "options of a request router": ((), (f"{_ENGINE}.router_init_kwargs",)),
    "keeping the cache aside while weights arrive": ((False,), (f"{_ENGINE}.offload_kv_for_weight_sync",)),
    "speculative decoding": ((None,), (f"{_ENGINE}.speculative_config",)),
    "multi-token prediction": (
        (False, None, 0),
        (
            "trainer.mtp",
            *(
                f"trainer.{model}.{_MEGATRON}.mtp_{name}"
                for model in ("policy", "ref")
                for name in ("num_layers", "loss_weight", "loss_chunk_size", "loss_topk")
            ),
        ),
    ),
    "expandable segments of the CUDA allocator": (
        (False,),
        (f"{_ENGINE}.use_expandable_segments", "trainer.use_expandable_segments"),
    ),
    "salts of the prefix cache (every cache is dropped when weights arrive)": ((True,), ("generator.use_cache_salt",)),
    "quantization-aware training": (
        (False, None),
        tuple(f"trainer.{model}.model.fake_int4_qat" for model in ("policy", "ref", "critic")),
    ),
    "several adapters at a time": (
        (1, None),
        tuple(
            f"trainer.{model}.model.lora.{name}"
            for model in ("policy", "ref", "critic")
            for name in ("max_loras", "max_cpu_loras")
        ),
    ),
    "monitoring GPUs through Ray": ((False,), ("trainer.enable_ray_gpu_monitor",)),
    "asynchronous training by full batches": ((False,), ("trainer.fully_async.sample_full_batch",)),
    "simulated training": (
        (False,),
        tuple(
            f"trainer.fully_async.{name}"
            for name in ("simulate_training", "simulate_training_step_seconds", "simulate_weight_sync_seconds")
        ),
    ),
    "choosing how the last layer is chunked (where that saves memory, the table of logits is never made)": (
        (False, True, None, 0, 512, 1024, "torch"),
        (
            "trainer.fused_lm_head_logprob",
            "trainer.fused_lm_head_logprob_backend",
            "trainer.logprobs_chunk_size",
            "trainer.vocab_entropy_chunk_size",
            "trainer.vocab_entropy_chunk_memory_mb",
        ),
    ),
    "old log-probabilities mini-batch by mini-batch": ((), ("trainer.recompute_old_logprobs_per_minibatch",)),
    "examples in the log": (
        (-1, 0),
        (
            "trainer.log_example_interval",
            "trainer.print_example_interval",
            "trainer.num_logger_eval_samples",
            "trainer.num_logger_train_samples",
        ),
    ),
    "loading a policy for inference only": ((False,), ("trainer.policy.inference_only_init",)),
    "traces of every step by torch.profiler (trainer.profile_steps traces chosen ones)": (
        (False,),
        ("trainer.policy.torch_profiler_config",),
    ),
    "later options of Megatron": (
        (False, None),
        tuple(
            f"trainer.{model}.{_MEGATRON}.{name}"
            for model in ("policy", "ref")
            for name in (
                "async_dist_ckpt_save",
                "async_dist_ckpt_strategy",
                "async_save_prestage_to_cpu",
                "freeze_moe_router",
                "hf_export_config",
                "lora_config.merge_lora",
                "moe_aux_loss_coeff",
                "moe_per_layer_logging",
                "moe_router_dtype",
            )
        ),
    ),
}


def _why(capability: str) -> str:
    return f"SkyRL added this after March 2026, and it is not implemented yet: {capability}"


NEWER_UPSTREAM_FIELDS: tuple[Migration, ...] = tuple(
    Migration(old=path, why=_why(capability), harmless=harmless, is_later=True)
    for capability, (harmless, paths) in _CAPABILITIES.items()
    for path in paths
)
"""One entry for each path, or for each table."""
