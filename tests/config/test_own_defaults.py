"""Defaults that the seeds' tree has no counterpart of: written out once more, so that none can change unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import SkyRLTrainConfig, load
from skyrl.config.cluster import SlurmConfig
from skyrl.tree import get_at

OF_A_RUN: dict[str, Any] = {
    "environment.skyrl_gym.step_timeout_seconds": 300.0,
    "environment.skyrl_gym.max_attempts": 3,
    "environment.skyrl_gym.max_failed_share": 0.2,
    "environment.skyrl_gym.isolate_user_env": False,
    "environment.skyrl_gym.user_env_memory_gb": 4.0,
    "environment.skyrl_gym.math_equivalence": False,
    "environment.skyrl_gym.reward_model.timeout": 60,
    "generator.sampling_params.frequency_penalty": 0.0,
    "trainer.algorithm.reward_shaping.norm.mean_leave1out": False,
    "trainer.algorithm.reward_shaping.norm.std_unbiased": True,
    "trainer.algorithm.reward_shaping.norm.eps": 1e-5,
    "trainer.algorithm.reward_shaping.overlong.penalty_factor": 1.0,
    "trainer.algorithm.reward_shaping.overlong.floor": True,
    "trainer.algorithm.reward_shaping.bias": 0.0,
    "trainer.algorithm.reward_shaping.scale": 1.0,
    "trainer.algorithm.gmpo.log_clip_low": 0.4,
    "trainer.algorithm.gmpo.log_clip_high": 0.4,
    "trainer.algorithm.decoupled.dual_clip": False,
    "trainer.algorithm.clip_cov.clip_cov_lb": 1.0,
    "trainer.algorithm.dynamic_sampling.min_success_rate": 0.0,
    "trainer.algorithm.dynamic_sampling.max_success_rate": 1.0,
    "trainer.policy.model.init_from_scratch": False,
    "trainer.policy.optimizer_config.min_loss_scale": 1.0,
    "trainer.policy.optimizer_config.loss_scale_window": 100,
    "trainer.policy.optimizer_config.min_lr_ratio": 0.0,
    "trainer.policy.megatron_config.moe_grouped_gemm": True,
}

OF_A_SUPERVISED_RUN: dict[str, Any] = {
    "seed": 42,
    "num_epochs": 1,
    "batch_size": 4,
    "micro_train_batch_size_per_gpu": 2,
    "max_tokens_per_microbatch": -1,
    "use_sequence_packing": True,
    "deterministic": False,
    "eval_before_train": False,
    "eval_interval": 0,
    "ckpt_interval": 0,
    "max_ckpts_to_keep": -1,
    "resume_with_changes": False,
    "recover_retries": 3,
    "hf_save_interval": 0,
    "optimizer_config.lr": 2e-5,
    "placement.num_nodes": 1,
    "placement.num_gpus_per_node": 1,
    "placement.start_timeout_seconds": 600.0,
    "placement.call_timeout_seconds": 3600.0,
    "placement.heartbeat_timeout_seconds": 60.0,
}

OF_A_SLURM_JOB: dict[str, Any] = {"cpus_per_gpu": 8, "signal_before": 300.0, "max_requeues": 100}


def test_defaults_of_our_own_fields() -> None:
    default = SkyRLTrainConfig()
    assert {path: get_at(default, path) for path in OF_A_RUN} == OF_A_RUN


def test_defaults_of_a_job_of_slurm() -> None:
    default = SlurmConfig()
    assert {path: get_at(default, path) for path in OF_A_SLURM_JOB} == OF_A_SLURM_JOB


@pytest.mark.parametrize(("kind", "rows"), [("sft", 2), ("reward_model", 4)])
def test_defaults_of_supervised_runs_reach_the_learner(kind: str, rows: int) -> None:
    run: Any = load([], {"kind": kind}).config
    assert {path: get_at(run, path) for path in OF_A_SUPERVISED_RUN} == OF_A_SUPERVISED_RUN
    assert (run.trainer.seed, run.trainer.min_microbatches, run.trainer.ckpt_verify) == (42, 1, "digest")
    assert run.trainer.micro_forward_batch_size_per_gpu == rows  # a pair is two rows
