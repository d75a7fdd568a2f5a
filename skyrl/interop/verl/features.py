"""Features of verl that one setting turns on, and the settings that verl reads only then; lines are those of 0.9.1."""

from __future__ import annotations

from collections.abc import Callable

from skyrl.interop.switches import Switch

_TRAINER = "trainer/ppo/v1/trainer_base.py"
_MUON = ("muon_*", "use_layer_wise_distributed_optimizer", "use_layer_wise_param_layout")
_LOW_PRECISION = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _other_than(*active: object) -> Callable[[object], bool]:
    """The feature is off unless the switch has one of these values."""
    return lambda value: value not in active


SWITCHES = (
    Switch(key="distillation.enabled", settings=("distillation.*",), source="trainer/ppo/utils.py:82"),
    *(
        Switch(key=f"skip.{name}.enable", settings=(f"skip.{name}.*",), source="utils/skip/base_skip.py:47")
        for name in ("rollout", "rollout_tq", "async_rollout")
    ),
    Switch(
        key="actor_rollout_ref.rollout.skip.enable",
        settings=("actor_rollout_ref.rollout.skip.*",),
        source="utils/rollout_skip.py:56 of 0.8.0",
    ),
    Switch(
        key="actor_rollout_ref.rollout.skip_rollout",
        settings=("actor_rollout_ref.rollout.skip_dump_dir",),
        source="utils/rollout_skip.py:48 of 0.8.0.dev",
    ),
    Switch(key="*.qat.enable", settings=("*.qat.*",), source="workers/engine/fsdp/transformer_impl.py:174"),
    Switch(
        key="*.disaggregation.enabled",
        settings=("*.disaggregation.*",),
        source="workers/rollout/llm_server.py:395",
    ),
    Switch(key="*.mtp.enable", settings=("*.mtp.*",), source="workers/config/model.py:238"),
    Switch(key="*.tiled_mlp.enabled", settings=("*.tiled_mlp.*",), source="workers/config/model.py:142"),
    Switch(
        key="*.prometheus.enable",
        settings=("*.prometheus.*",),
        source="workers/rollout/vllm_rollout/vllm_async_server.py:368",
    ),
    Switch(key="*.trace.backend", settings=("*.trace.*",), default=None, source="utils/rollout_trace.py:148"),
    Switch(
        key="*.optim.optimizer",
        settings=tuple(f"*.optim.{name}" for name in _MUON),
        default="adam",
        is_off=_other_than("muon"),
        source="utils/megatron/optimizer.py:29",
    ),
    Switch(
        key="*.optim.use_precision_aware_optimizer",
        settings=tuple(f"*.optim.{name}" for name in _LOW_PRECISION),
        source="utils/megatron/optimizer.py:188",
    ),
    Switch(
        key="*.optim.lr_decay_style",
        settings=("*.optim.lr_wsd_*",),
        default="constant",
        is_off=_other_than("WSD"),
        source="utils/megatron/optimizer.py:243",
    ),
    Switch(
        key="*.use_dist_checkpointing",
        settings=("*.dist_checkpointing_path", "*.dist_checkpointing_prefix"),
        source="workers/engine/megatron/transformer_impl.py:499",
    ),
    Switch(
        key="*.dynamic_context_parallel",
        settings=("*.max_seqlen_per_dp_cp_rank",),
        source="workers/engine/megatron/transformer_impl.py:113",
    ),
    Switch(
        key="actor_rollout_ref.actor.policy_loss.loss_mode",
        settings=("actor_rollout_ref.actor.policy_loss.dro_beta",),
        default="vanilla",
        is_off=_other_than("dro"),
        source="trainer/ppo/core_algos.py:2026",
    ),
    Switch(key="reward.reward_model.enable", settings=("reward.reward_model.*",), source="trainer/ppo/utils.py:93"),
    *(
        Switch(
            key=f"{table}sandbox_fusion.url",
            settings=(f"{table}sandbox_fusion.*",),
            default=None,
            source="trainer/ppo/reward.py:138",
        )
        for table in ("reward.", "")
    ),
    Switch(
        key="reward.reward_manager.source",
        settings=("reward.reward_manager.module.*",),
        default="register",
        is_off=_other_than("importlib"),
        source="trainer/ppo/reward.py:96",
    ),
    Switch(key="trainer.use_v1", settings=("trainer.v1.*",), default=True, source="trainer/main_ppo.py:183"),
    *(
        Switch(
            key="trainer.v1.trainer_mode",
            settings=(f"trainer.v1.{mode}.*",),
            default="sync",
            is_off=_other_than(mode),
            source=f"{_TRAINER}:130",
        )
        for mode in ("colocate_async", "separate_async")
    ),
    Switch(
        key="trainer.v1.trainer_mode",
        settings=("trainer.v1.sampler.max_off_policy_*",),
        default="sync",
        is_off=_other_than("colocate_async", "separate_async"),
        source="trainer/ppo/v1/replay_buffer.py:97",
    ),
    Switch(
        key="trainer.v1.separate_async.hybrid_rollout.enable_switch",
        settings=("trainer.v1.separate_async.hybrid_rollout.*",),
        source="trainer/ppo/v1/trainer_separate_async.py:95",
    ),
    Switch(
        key="trainer.v1.sampler.custom_sampler.path",
        settings=("trainer.v1.sampler.custom_sampler.name", "trainer.v1.sampler.sampler_kwargs*"),
        default=None,
        source=f"{_TRAINER}:147",
    ),
    Switch(
        key="async_training.use_dynamic_resource_scheduling",
        settings=("async_training.dynamic_schedule_*",),
        source="experimental/fully_async_policy/fully_async_trainer.py:189",
    ),
    *(
        Switch(
            key=f"{table}.lora_rank",
            settings=tuple(f"{table}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")),
            default=0,
            source="workers/engine/fsdp/transformer_impl.py:162",
        )
        for table in ("actor_rollout_ref.model", "critic.model")
    ),
    Switch(
        key="*.use_fused_kernels",
        settings=("*.fused_kernel_options.*",),
        source="workers/engine/fsdp/transformer_impl.py:318",
    ),
    Switch(key="algorithm.use_pf_ppo", settings=("algorithm.pf_ppo.*",), source="trainer/ppo/ray_trainer.py:229"),
)
