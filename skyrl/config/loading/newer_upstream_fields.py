"""Fields that SkyRL added to its tree after the version that this tree follows, up to SkyRL 0.4.0.

A field that turns on a feature which is missing here is refused by the feature's name; a value that asks for nothing,
such as `enabled = false`, is dropped with a warning. So are all settings that only such a feature reads, since the
feature itself is refused. A field whose effect another field has here is followed to that field.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from skyrl.tree.migrations import Migration

_ENGINE = "generator.inference_engine"
_POLICY_AND_REF = ("policy", "ref")
_MODELS = ("policy", "ref", "critic")


def _names_in_models(models: tuple[str, ...], *names: str) -> tuple[str, ...]:
    """The names in the table of every model."""
    return tuple(f"trainer.{model}.{name}" for model in models for name in names)


def _megatron(*names: str) -> tuple[str, ...]:
    """The names in the Megatron table of every model that has one."""
    return _names_in_models(_POLICY_AND_REF, *(f"megatron_config.{name}" for name in names))


@frozen(kw_only=True)
class _Feature:
    """A capability of a later SkyRL that is missing here."""

    name: str
    switches: tuple[str, ...]
    """Fields, or tables of fields, that ask for it."""

    nothing: tuple[Any, ...]
    """Values of the switches that do not ask for it."""

    settings: tuple[str, ...] = ()
    """Fields that SkyRL reads only while the feature is on."""

    source: str = ""
    """File and line of SkyRL 0.4.0 that shows this of `settings`."""

    @property
    def migrations(self) -> tuple[Migration, ...]:
        """A refusal of each switch, and a warning for each setting that only the feature reads."""
        reason = f"SkyRL added this after March 2026, and it is not implemented yet: {self.name}"
        unread = f"only read with {self.switches[0]}, which is refused here"
        return (
            *(Migration(old=path, reason=reason, harmless=self.nothing, is_later=True) for path in self.switches),
            *(Migration(old=path, reason=unread, needless=True) for path in self.settings),
        )


_QUANTIZED = _names_in_models(_MODELS, "model.fake_int4_qat")
_PROFILER = "trainer.policy.torch_profiler_config"
_SIMULATED = "trainer.fully_async.simulate_"

FEATURES: tuple[_Feature, ...] = (
    _Feature(name="vision-language rollouts", switches=("generator.vision_language_generator",), nothing=(False,)),
    _Feature(
        name="disaggregated prefill",
        switches=(f"{_ENGINE}.enable_pd",),
        nothing=(False,),
        settings=tuple(f"{_ENGINE}.{name}" for name in ("num_prefill", "prefill_init_kwargs", "decode_init_kwargs")),
        source="backends/skyrl_train/inference_servers/setup.py:91, train/utils/utils.py:716",
    ),
    _Feature(name="options of a request router", switches=(f"{_ENGINE}.router_init_kwargs",), nothing=({}, None)),
    _Feature(
        name="keeping the cache aside while weights arrive",
        switches=(f"{_ENGINE}.offload_kv_for_weight_sync",),
        nothing=(False,),
    ),
    _Feature(name="speculative decoding", switches=(f"{_ENGINE}.speculative_config",), nothing=(None,)),
    _Feature(
        name="multi-token prediction",
        switches=("trainer.mtp.enabled", "trainer.mtp"),
        nothing=(False, None, 0),
        settings=(
            "trainer.mtp.num_speculative_tokens",
            "trainer.mtp.loss_weight",
            *_megatron("mtp_num_layers", "mtp_loss_weight", "mtp_loss_chunk_size", "mtp_loss_topk"),
        ),
        source="train/utils/utils.py:313",
    ),
    _Feature(
        name="quantization-aware training",
        switches=(*(f"{table}.enabled" for table in _QUANTIZED), *_QUANTIZED),
        nothing=(False, None),
        settings=tuple(
            f"{table}.{name}"
            for table in _QUANTIZED
            for name in ("group_size", "symmetric", "scale_divisor", "q_min", "bf16_base_path")
        ),
        source="backends/skyrl_train/workers/megatron/megatron_worker.py:146",
    ),
    _Feature(
        name="several adapters at a time",
        switches=_names_in_models(_MODELS, "model.lora.max_loras", "model.lora.max_cpu_loras"),
        nothing=(1, None),
    ),
    _Feature(
        name="adapters that experts share, or whose rank depends on the experts",
        switches=_megatron("lora_config.experts_shared_outer_loras", "lora_config.normalize_moe_lora"),
        nothing=(False,),
    ),
    _Feature(
        name="simulated training",
        switches=(f"{_SIMULATED}training",),
        nothing=(False,),
        settings=(f"{_SIMULATED}training_step_seconds", f"{_SIMULATED}weight_sync_seconds"),
        source="train/entrypoints/main_base.py:306, train/fully_async_trainer_sim.py:78",
    ),
    _Feature(
        name="loading a policy for inference only", switches=("trainer.policy.inference_only_init",), nothing=(False,)
    ),
    _Feature(
        name="traces on a schedule (trainer.profile_steps lists the steps to trace)",
        switches=(f"{_PROFILER}.enable", _PROFILER),
        nothing=(False,),
        settings=tuple(
            f"{_PROFILER}.{name}"
            for name in (
                "ranks", "save_path", "skip_first", "wait", "warmup", "active", "repeat", "activities", "record_shapes",
                "profile_memory", "with_stack", "with_flops", "with_modules", "use_gzip", "export_type",
            )
        ),
        source="backends/skyrl_train/utils/profiler.py:21",
    ),
    _Feature(
        name="training in FP8",
        switches=_megatron("fp8", "fp8_recipe", "fp8_param", "fp8_amax_compute_algo", "ddp_config.fp8_param_gather"),
        nothing=(None, False),
    ),
    _Feature(
        name="sending weights to engines in FP8", switches=(f"{_ENGINE}.fp8_weight_sync_mode",), nothing=(None,)
    ),
    _Feature(
        name="replaying the sampler's support",
        switches=(
            "trainer.algorithm.enable_sample_support_replay",
            f"{_ENGINE}.enable_return_sample_support_set",
        ),
        nothing=(False,),
    ),
    _Feature(
        name="freezing the routers or the attention's indexer",
        switches=_megatron("freeze_moe_router", "freeze_dsa_indexer"),
        nothing=(False, None),
    ),
    _Feature(
        name="metrics of every layer of experts", switches=_megatron("moe_per_layer_logging"), nothing=(False, None)
    ),
    _Feature(
        name="tables of answers apart for training and evaluation (trainer.trackers.sample_rows is of both)",
        switches=("trainer.num_logger_eval_samples", "trainer.num_logger_train_samples"),
        nothing=(-1, 0),
    ),
)  # fmt: skip
"""A path counts for the first feature that has it."""

_CHUNKS = "how much of the last layer is computed at once; the values are the same"
_ALLOCATOR = "how torch's allocator reserves memory; export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for it"

_NEEDLESS: dict[str, tuple[str, ...]] = {
    # reason: paths; above each, the lines of SkyRL 0.4.0
    # train/utils/trainer_utils.py:911-928
    "rows are read ahead in the run's own process, in the same order": (
        "data.dataloader.num_workers", "data.dataloader.persistent_workers",
    ),
    # backends/skyrl_train/workers/worker.py:312, backends/skyrl_train/inference_servers/engine_utils.py:46
    _ALLOCATOR: (f"{_ENGINE}.use_expandable_segments", "trainer.use_expandable_segments"),
    # train/generators/skyrl_gym_generator.py:332
    "every cache is dropped when weights arrive, or shares no prefixes": ("generator.use_cache_salt",),
    # train/trainer.py:147
    "metrics of GPUs and memory are not collected through Ray": ("trainer.enable_ray_gpu_monitor",),
    # train/config/config.py:1604-1619
    _CHUNKS: (
        "trainer.fused_lm_head_logprob", "trainer.fused_lm_head_logprob_backend", "trainer.logprobs_chunk_size",
        "trainer.vocab_entropy_chunk_size", "trainer.vocab_entropy_chunk_memory_mb",
    ),
    # train/trainer.py:1291
    "old log-probabilities are computed before the first update, with the same values": (
        "trainer.recompute_old_logprobs_per_minibatch",
    ),
    # train/trainer.py:386, train/evaluate.py:212
    "skyrl watch and skyrl view show answers of every step": (
        "trainer.log_example_interval", "trainer.print_example_interval",
    ),
    # backends/skyrl_train/workers/megatron/megatron_worker.py:752
    "how many ranks write an export; the files are the same": _megatron("hf_export_config"),
    # backends/skyrl_train/distributed/megatron/megatron_strategy.py:371; a reference is not saved
    "a save copies the state and then writes it in the background; the files are the same": (
        *_megatron("async_save_prestage_to_cpu", "async_dist_ckpt_strategy"),
        "trainer.ref.megatron_config.async_dist_ckpt_save",
    ),
    # train/utils/utils.py:690-714: engines sample from the same policy
    "whether an adapter is sent alone, and how, follows from the engines (docs/lora-and-export.md)": (
        *_megatron("lora_config.merge_lora"), *_names_in_models(_MODELS, "model.lora.sync_mode"),
    ),
    # backends/skyrl_train/workers/megatron/megatron_worker.py:487
    "acts on adapters of experts under Megatron, which have none here": _names_in_models(
        _MODELS, "model.lora.share_expert_adapters"
    ),
}  # fmt: skip


def _filter(value: object) -> object:
    return "filter" if value is True else value


NEWER_UPSTREAM_FIELDS: tuple[Migration, ...] = (
    *(migration for feature in FEATURES for migration in feature.migrations),
    *(Migration(old=path, reason=reason, needless=True) for reason, paths in _NEEDLESS.items() for path in paths),
    # train/fully_async_trainer.py:383: a batch is filled with groups whose rewards differ, as by dynamic sampling
    Migration(
        old="trainer.fully_async.sample_full_batch",
        new="trainer.algorithm.dynamic_sampling.type",
        convert=_filter,
        harmless=(False,),
    ),
    Migration(old="trainer.policy.megatron_config.async_dist_ckpt_save", new="trainer.async_ckpt_save"),
    # backends/skyrl_train/workers/megatron/megatron_worker.py:321-322: both are fields of Megatron's TransformerConfig
    *(
        Migration(old=f"{table}.{name}", new=f"{table}.transformer_config_kwargs.{name}")
        for table in _names_in_models(_POLICY_AND_REF, "megatron_config")
        for name in ("moe_aux_loss_coeff", "moe_router_dtype")
    ),
)
"""One entry for each path, or for each table."""
