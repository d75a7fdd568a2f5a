"""The settings of a supervised run as a `TrainerConfig`, so that learners, checkpoints and sessions need one form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.learners import CriticConfig, PolicyConfig
from skyrl.config.placement import PlacementConfig
from skyrl.config.trainer import TrainerConfig

if TYPE_CHECKING:
    from skyrl.config.supervised.placement import SFTPlacementConfig
    from skyrl.config.supervised.root import SupervisedConfig

SCORE = "score"
"""Name of a reward model's head, which is the one that transformers gives it."""

_OF_A_LEARNER = (
    "model", "optimizer_config", "fsdp_config", "deepspeed_config", "use_dropout", "sequence_parallel_size",
    "context_parallel_size", "tensor_parallel_size", "expert_parallel_size",
)  # fmt: skip
"""Fields that a policy and a critic have under the same name. Which of both learns is the experiment's choice."""

_OF_A_TRAINER = (
    "strategy", "faults", "device", "seed", "deterministic", "max_tokens_per_microbatch", "compute_dtype", "attention",
    "recompute_activations", "offload_activations", "tokenizer_path", "disable_fast_tokenizer", "eval_before_train",
    "eval_interval", "resume_with_changes", "recover_mode", "recover_retries", "ckpt_interval", "max_ckpts_to_keep",
    "hf_save_interval", "run_path", "project_name", "run_name", "logger", "trackers", "alarms", "profile_steps",
)  # fmt: skip
"""Fields that `TrainerConfig` has under the same name."""


def trainer_of(run: SupervisedConfig) -> TrainerConfig:
    """The same run as a `TrainerConfig`: one batch is one mini-batch of one optimizer step."""
    rows, resume = run.micro_train_batch_size_per_gpu * run.rows_of_an_item, run.resume_from
    named = resume not in ("", "latest")
    learner: dict[str, Any] = {name: getattr(run, name) for name in _OF_A_LEARNER}
    return TrainerConfig(
        **{name: getattr(run, name) for name in _OF_A_TRAINER},
        policy=PolicyConfig(**learner, record_memory=run.record_memory, use_torch_compile=run.compiles),
        critic=CriticConfig(**learner),
        algorithm=AlgorithmConfig(temperature=1.0, use_kl_loss=False, value_head_prefix=SCORE),
        placement=_placement_of(run.placement),
        train_batch_size=run.batch_size,
        policy_mini_batch_size=run.batch_size,
        critic_mini_batch_size=run.batch_size,
        micro_train_batch_size_per_gpu=rows,
        micro_forward_batch_size_per_gpu=rows,
        use_sample_packing=run.use_sequence_packing,
        resume_mode="from_path" if named else "latest" if resume else "none",
        resume_path=resume if named else None,
        ckpt_path=run.ckpt_path or "",
        export_path=run.export_path or "",
        log_path=run.log_path or "",
    )


def _placement_of(own: SFTPlacementConfig) -> PlacementConfig:
    return PlacementConfig(
        colocate_all=False,
        colocate_policy_ref=False,
        policy_num_nodes=own.num_nodes,
        policy_num_gpus_per_node=own.num_gpus_per_node,
        executor=own.executor,
        ray_address=own.ray_address,
        start_timeout_seconds=own.start_timeout_seconds,
        call_timeout_seconds=own.call_timeout_seconds,
        heartbeat_timeout_seconds=own.heartbeat_timeout_seconds,
    )
