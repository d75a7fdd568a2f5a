"""Cases of the checks in `skyrl.config.checks.plausible`."""

from __future__ import annotations

from typing import Any

SAMPLING = "generator.sampling_params."
ALGORITHM = "trainer.algorithm."
LOSS = "trainer.algorithm.policy_loss_type"
WARMUP = "trainer.policy.optimizer_config.num_warmup_steps"
CAP = "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high"
RATIOS: dict[str, Any] = {"trainer.algorithm.off_policy_correction.tis_ratio_type": "token"}
HALF = "generator.inference_engine.model_dtype"
SHARE = "generator.inference_engine.gpu_memory_utilization"
CUDA: dict[str, Any] = {"trainer.device": "cuda"}
BUDGET = "trainer.max_tokens_per_microbatch"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "training_sampling_is_not_truncated": [
        ({SAMPLING + "top_p": 0.9}, SAMPLING + "top_p"),
        ({SAMPLING + "top_k": 50}, SAMPLING + "top_k"),
        ({SAMPLING + "min_p": 0.1}, SAMPLING + "min_p"),
    ],
    "training_temperature_is_plausible": [({SAMPLING + "temperature": 100.0}, SAMPLING + "temperature")],
    "algorithm_settings_are_plausible": [
        ({ALGORITHM + "eps_clip_low": 20.0}, ALGORITHM + "eps_clip_low"),
        ({ALGORITHM + "eps_clip_high": 20.0}, ALGORITHM + "eps_clip_high"),
        ({LOSS: "dual_clip", ALGORITHM + "clip_ratio_c": 1e6}, ALGORITHM + "clip_ratio_c"),
        ({LOSS: "cispo", ALGORITHM + "cispo.cispo_eps_clip_low": 1.5}, ALGORITHM + "cispo.cispo_eps_clip_low"),
        ({LOSS: "cispo", ALGORITHM + "cispo.cispo_eps_clip_high": 400.0}, ALGORITHM + "cispo.cispo_eps_clip_high"),
        ({LOSS: "dppo", ALGORITHM + "dppo.delta_low": 20.0}, ALGORITHM + "dppo.delta_low"),
        ({LOSS: "dppo", ALGORITHM + "dppo.delta_high": 1.01}, ALGORITHM + "dppo.delta_high"),
        ({LOSS: "gmpo", ALGORITHM + "gmpo.log_clip_low": 40.0}, ALGORITHM + "gmpo.log_clip_low"),
        ({LOSS: "gmpo", ALGORITHM + "gmpo.log_clip_high": 4.0}, ALGORITHM + "gmpo.log_clip_high"),
        ({ALGORITHM + "kl_loss_coef": 10.0}, ALGORITHM + "kl_loss_coef"),
        (
            {ALGORITHM + "use_entropy_loss": True, ALGORITHM + "entropy_loss_coef": 5.0},
            ALGORITHM + "entropy_loss_coef",
        ),
    ],
    "reward_scale_is_not_zero": [({ALGORITHM + "reward_shaping.scale": 0.0}, ALGORITHM + "reward_shaping.scale")],
    "kl_penalty_has_weight": [({"trainer.algorithm.kl_loss_coef": 0.0}, "trainer.algorithm.kl_loss_coef")],
    "ratio_cap_reaches_one": [({**RATIOS, CAP: 0.5}, CAP)],
    # 1,024 prompts in mini-batches of 256: 4 optimizer steps in each of 3 training steps
    "warmup_ends_within_run": [({"trainer.max_training_steps": 3, WARMUP: 12}, WARMUP)],
    "longest_sequence_fits_micro_batch": [({BUDGET: 1535}, BUDGET)],  # 512 of prompt and 1,024 of answer
    "engine_dtype_matches_learner": [({**CUDA, HALF: "float16"}, HALF)],
    "engines_leave_learner_memory": [({**CUDA, SHARE: 1.0}, SHARE)],
    "evaluation_data_is_held_out": [({"data.train_data": ["a", "b"], "data.val_data": ["b"]}, "data.val_data")],
    "checkpoint_and_export_paths_differ": [
        ({"trainer.ckpt_path": "x", "trainer.export_path": "x/"}, "trainer.export_path")
    ],
    "run_name_is_folder_name": [
        ({"trainer.run_name": "../../x"}, "trainer.run_name"),
        ({"trainer.run_name": ""}, "trainer.run_name"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "training_sampling_is_not_truncated": {"generator.eval_sampling_params.top_p": 0.9},
    "training_temperature_is_plausible": {SAMPLING + "temperature": 2.0},
    "algorithm_settings_are_plausible": {ALGORITHM + "eps_clip_high": 1.0, ALGORITHM + "dppo.delta_low": 20.0},
    "reward_scale_is_not_zero": {ALGORITHM + "reward_shaping.scale": -1.0},
    "kl_penalty_has_weight": {"trainer.algorithm.kl_loss_coef": 0.0, "trainer.algorithm.use_kl_loss": False},
    "ratio_cap_reaches_one": {CAP: 0.5},
    "warmup_ends_within_run": {"trainer.max_training_steps": 3, WARMUP: 11},
    "longest_sequence_fits_micro_batch": {BUDGET: 1536},
    "engine_dtype_matches_learner": {**CUDA, HALF: "bfloat16"},
    "engines_leave_learner_memory": {**CUDA, SHARE: 0.9},
    "evaluation_data_is_held_out": {"data.train_data": ["a"], "data.val_data": ["b"]},
    "checkpoint_and_export_paths_differ": {"trainer.run_path": "x"},
    "run_name_is_folder_name": {"trainer.run_name": "", "trainer.run_path": "x"},
}
