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
    "training_samples_are_drawn_from_the_whole_distribution": [
        ({SAMPLING + "top_p": 0.9}, SAMPLING + "top_p"),
        ({SAMPLING + "top_k": 50}, SAMPLING + "top_k"),
        ({SAMPLING + "min_p": 0.1}, SAMPLING + "min_p"),
    ],
    "training_samples_are_not_noise": [({SAMPLING + "temperature": 100.0}, SAMPLING + "temperature")],
    "the_algorithm_is_set_within_its_range": [
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
    "rewards_are_not_made_equal": [({ALGORITHM + "reward_shaping.scale": 0.0}, ALGORITHM + "reward_shaping.scale")],
    "a_kl_penalty_has_a_weight": [({"trainer.algorithm.kl_loss_coef": 0.0}, "trainer.algorithm.kl_loss_coef")],
    "importance_ratios_are_not_cut_below_one": [({**RATIOS, CAP: 0.5}, CAP)],
    # 1,024 prompts in mini-batches of 256: 4 optimizer steps in each of 3 training steps
    "warm_up_ends_before_the_run_does": [({"trainer.max_training_steps": 3, WARMUP: 12}, WARMUP)],
    "the_longest_sequence_fits_into_a_micro_batch": [({BUDGET: 1535}, BUDGET)],  # 512 of prompt and 1,024 of answer
    "engine_and_learner_compute_in_the_same_type": [({**CUDA, HALF: "float16"}, HALF)],
    "engines_leave_memory_to_the_learner": [({**CUDA, SHARE: 1.0}, SHARE)],
    "evaluation_is_on_other_data": [({"data.train_data": ["a", "b"], "data.val_data": ["b"]}, "data.val_data")],
    "checkpoints_and_exports_have_folders_of_their_own": [
        ({"trainer.ckpt_path": "x", "trainer.export_path": "x/"}, "trainer.export_path")
    ],
    "a_run_name_is_the_name_of_a_folder": [
        ({"trainer.run_name": "../../x"}, "trainer.run_name"),
        ({"trainer.run_name": ""}, "trainer.run_name"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "training_samples_are_drawn_from_the_whole_distribution": {"generator.eval_sampling_params.top_p": 0.9},
    "training_samples_are_not_noise": {SAMPLING + "temperature": 2.0},
    "the_algorithm_is_set_within_its_range": {ALGORITHM + "eps_clip_high": 1.0, ALGORITHM + "dppo.delta_low": 20.0},
    "rewards_are_not_made_equal": {ALGORITHM + "reward_shaping.scale": -1.0},
    "a_kl_penalty_has_a_weight": {"trainer.algorithm.kl_loss_coef": 0.0, "trainer.algorithm.use_kl_loss": False},
    "importance_ratios_are_not_cut_below_one": {CAP: 0.5},
    "warm_up_ends_before_the_run_does": {"trainer.max_training_steps": 3, WARMUP: 11},
    "the_longest_sequence_fits_into_a_micro_batch": {BUDGET: 1536},
    "engine_and_learner_compute_in_the_same_type": {**CUDA, HALF: "bfloat16"},
    "engines_leave_memory_to_the_learner": {**CUDA, SHARE: 0.9},
    "evaluation_is_on_other_data": {"data.train_data": ["a"], "data.val_data": ["b"]},
    "checkpoints_and_exports_have_folders_of_their_own": {"trainer.run_path": "x"},
    "a_run_name_is_the_name_of_a_folder": {"trainer.run_name": "", "trainer.run_path": "x"},
}
