"""Features of verl that one setting turns on, and the settings that verl reads only then; lines are those of 0.9.1."""

from __future__ import annotations

from skyrl.interop.systems import Switch, other_than

_TRAINER = "trainer/ppo/v1/trainer_base.py"
_MUON = ("muon_*", "use_layer_wise_distributed_optimizer", "use_layer_wise_param_layout")
_LOW_PRECISION = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


SWITCHES = (
    Switch("data.shuffle", ("data.seed",), "trainer/ppo/utils.py:157", default=True),
    Switch("distillation.enabled", ("distillation.*",), "trainer/ppo/utils.py:82"),
    *(
        Switch(f"skip.{name}.enable", (f"skip.{name}.*",), "utils/skip/base_skip.py:47")
        for name in ("rollout", "rollout_tq", "async_rollout")
    ),
    Switch(
        "actor_rollout_ref.rollout.skip.enable",
        ("actor_rollout_ref.rollout.skip.*",),
        "utils/rollout_skip.py:56 of 0.8.0",
    ),
    Switch(
        "actor_rollout_ref.rollout.skip_rollout",
        ("actor_rollout_ref.rollout.skip_dump_dir",),
        "utils/rollout_skip.py:48 of 0.8.0.dev",
    ),
    Switch("*.qat.enable", ("*.qat.*",), "workers/engine/fsdp/transformer_impl.py:174"),
    Switch("*.disaggregation.enabled", ("*.disaggregation.*",), "workers/rollout/llm_server.py:395"),
    Switch("*.mtp.enable", ("*.mtp.*",), "workers/config/model.py:238"),
    Switch("*.tiled_mlp.enabled", ("*.tiled_mlp.*",), "workers/config/model.py:142"),
    Switch("*.prometheus.enable", ("*.prometheus.*",), "workers/rollout/vllm_rollout/vllm_async_server.py:368"),
    Switch("*.trace.backend", ("*.trace.*",), "utils/rollout_trace.py:148", default=None),
    Switch(
        "*.optim.optimizer",
        tuple(f"*.optim.{name}" for name in _MUON),
        "utils/megatron/optimizer.py:29",
        default="adam",
        is_off=other_than("muon"),
    ),
    Switch(
        "*.optim.use_precision_aware_optimizer",
        tuple(f"*.optim.{name}" for name in _LOW_PRECISION),
        "utils/megatron/optimizer.py:188",
    ),
    Switch(
        "*.optim.lr_decay_style",
        ("*.optim.lr_wsd_*",),
        "utils/megatron/optimizer.py:243",
        default="constant",
        is_off=other_than("WSD"),
    ),
    Switch(
        "*.use_dist_checkpointing",
        ("*.dist_checkpointing_path", "*.dist_checkpointing_prefix"),
        "workers/engine/megatron/transformer_impl.py:499",
    ),
    Switch(
        "*.dynamic_context_parallel",
        ("*.max_seqlen_per_dp_cp_rank",),
        "workers/engine/megatron/transformer_impl.py:113",
    ),
    Switch(
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        ("actor_rollout_ref.actor.policy_loss.dro_beta",),
        "trainer/ppo/core_algos.py:2026",
        default="vanilla",
        is_off=other_than("dro"),
    ),
    Switch("reward.reward_model.enable", ("reward.reward_model.*",), "trainer/ppo/utils.py:93"),
    *(
        Switch(f"{table}sandbox_fusion.url", (f"{table}sandbox_fusion.*",), "trainer/ppo/reward.py:138", default=None)
        for table in ("reward.", "")
    ),
    Switch(
        "reward.reward_manager.source",
        ("reward.reward_manager.module.*",),
        "trainer/ppo/reward.py:96",
        default="register",
        is_off=other_than("importlib"),
    ),
    Switch("trainer.use_v1", ("trainer.v1.*",), "trainer/main_ppo.py:183", default=True),
    *(
        Switch(
            "trainer.v1.trainer_mode",
            (f"trainer.v1.{mode}.*",),
            f"{_TRAINER}:130",
            default="sync",
            is_off=other_than(mode),
        )
        for mode in ("colocate_async", "separate_async")
    ),
    Switch(
        "trainer.v1.trainer_mode",
        ("trainer.v1.sampler.max_off_policy_*",),
        "trainer/ppo/v1/replay_buffer.py:97",
        default="sync",
        is_off=other_than("colocate_async", "separate_async"),
    ),
    Switch(
        "trainer.v1.separate_async.hybrid_rollout.enable_switch",
        ("trainer.v1.separate_async.hybrid_rollout.*",),
        "trainer/ppo/v1/trainer_separate_async.py:95",
    ),
    Switch(
        "trainer.v1.sampler.custom_sampler.path",
        ("trainer.v1.sampler.custom_sampler.name", "trainer.v1.sampler.sampler_kwargs*"),
        f"{_TRAINER}:147",
        default=None,
    ),
    Switch(
        "async_training.use_dynamic_resource_scheduling",
        ("async_training.dynamic_schedule_*",),
        "experimental/fully_async_policy/fully_async_trainer.py:189",
    ),
    *(
        Switch(
            f"{table}.lora_rank",
            tuple(f"{table}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")),
            "workers/engine/fsdp/transformer_impl.py:162",
            default=0,
        )
        for table in ("actor_rollout_ref.model", "critic.model")
    ),
    Switch("*.use_fused_kernels", ("*.fused_kernel_options.*",), "workers/engine/fsdp/transformer_impl.py:318"),
    Switch("algorithm.use_pf_ppo", ("algorithm.pf_ppo.*",), "trainer/ppo/ray_trainer.py:229"),
)
