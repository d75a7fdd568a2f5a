"""Cases of the checks in `skyrl.config.checks.models`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import APART, CRITIC, LORA, gpus

DEEPSPEED: dict[str, Any] = {"trainer.strategy": "deepspeed"}
ZERO = "trainer.policy.deepspeed_config.zero_optimization."
PRESCALE = "trainer.policy.deepspeed_config.prescale_gradients"
THETA = "trainer.policy.model_config_kwargs.rope_theta"
PRECISION = "trainer.policy.fsdp_config.mixed_precision."
WRAP = "trainer.policy.fsdp_config.wrap_policy"
OPTIMIZER = "trainer.policy.optimizer_config.optimizer"
INIT = "trainer.policy.model.lora.init_method"

RATE = "optimizer_config.lr"
DECAY, EPSILON, BETAS = (
    f"trainer.policy.optimizer_config.{name}" for name in ("weight_decay", "adam_eps", "adam_betas")
)

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "rotary_embeddings_are_given_once": [
        ({"trainer.rope_theta": 1e6, "trainer.policy.model_config_kwargs": {"rope_theta": 1e4}}, THETA)
    ],
    "learning_rates_suit_fine_tuning": [
        ({**CRITIC, f"trainer.{model}.{RATE}": rate}, f"trainer.{model}.{RATE}")
        for model in ("policy", "critic")
        for rate in (10.0, 1.5, 0.0)
    ],
    "optimizer_settings_are_plausible": [
        ({DECAY: 10.0}, DECAY),
        ({EPSILON: 1.0}, EPSILON),
        ({BETAS: [0.999, 0.9]}, BETAS),
    ],
    "dropout_has_its_switch": [
        ({**CRITIC, f"trainer.{model}.model_config_kwargs": {name: 0.1}}, f"trainer.{model}.model_config_kwargs.{name}")
        for model in ("policy", "critic")
        for name in ("attention_dropout", "resid_pdrop")
    ],
    "fsdp_size_divides_ranks": [
        (
            {**CRITIC, **gpus(8, role), f"trainer.{role}.fsdp_config.fsdp_size": size},
            f"trainer.{role}.fsdp_config.fsdp_size",
        )
        for role, size in (("policy", 3), ("critic", 16), ("ref", 5))
    ],
    "reshard_degree_divides_ranks": [
        (
            {**gpus(8, "policy"), "trainer.policy.fsdp_config.reshard_after_forward": 3},
            "trainer.policy.fsdp_config.reshard_after_forward",
        ),
        # 8 divides the ranks, but a copy has 4
        (
            {
                **gpus(8, "ref"),
                "trainer.ref.fsdp_config.fsdp_size": 4,
                "trainer.ref.fsdp_config.reshard_after_forward": 8,
            },
            "trainer.ref.fsdp_config.reshard_after_forward",
        ),
    ],
    "adapter_initialization_is_supported": [
        ({**LORA, INIT: "pissa"}, INIT),
        ({"trainer.policy.model.lora.rank": 3, INIT: "orthogonal"}, INIT),
    ],
    "nvme_offload_needs_folder": [
        ({**DEEPSPEED, ZERO + "offload_optimizer.device": "nvme"}, ZERO + "offload_optimizer.nvme_path"),
        (
            {
                **DEEPSPEED,
                ZERO + "stage": 2,
                ZERO + "offload_optimizer.device": "nvme",
                ZERO + "offload_optimizer.nvme_path": "/drive",
            },
            ZERO + "offload_optimizer.device",
        ),
    ],
    "frozen_adapters_are_stored": [
        ({"trainer.ref.model.lora.rank": 4}, "trainer.ref.model.lora.rank"),
    ],
    "adapters_need_base_weights": [
        ({**LORA, "trainer.policy.model.init_from_scratch": True}, "trainer.policy.model.init_from_scratch"),
    ],
    "muon_needs_whole_matrices": [
        ({**DEEPSPEED, OPTIMIZER: "muon"}, OPTIMIZER),
    ],
    "cpu_adam_needs_cpu_state": [
        ({OPTIMIZER: "cpu_adamw"}, OPTIMIZER),
        ({**DEEPSPEED, OPTIMIZER: "cpu_adamw"}, OPTIMIZER),
        ({**DEEPSPEED, OPTIMIZER: "cpu_adamw", ZERO + "offload_optimizer.device": "cpu", ZERO + "stage": 0}, OPTIMIZER),
    ],
    "lora_modules_are_listed": [
        ({**LORA, "trainer.policy.model.lora.exclude_modules": "q_proj"}, "trainer.policy.model.lora.exclude_modules"),
        ({**LORA, "trainer.policy.model.lora.target_modules": "q_proj"}, "trainer.policy.model.lora.target_modules"),
        ({**LORA, "trainer.policy.model.lora.target_modules": "*_proj"}, "trainer.policy.model.lora.target_modules"),
    ],
    "wrap_policy_names_classes": [
        ({WRAP: {"min_num_params": 100}}, WRAP),
        ({WRAP: {"transformer_layer_cls_to_wrap": [1]}}, WRAP),
    ],
    "gradient_prescaling_fits_stage": [
        ({**DEEPSPEED, PRESCALE: True}, PRESCALE),
        ({**DEEPSPEED, PRESCALE: True, ZERO + "stage": 2}, PRESCALE),
    ],
    "gather_buckets_are_aligned": [
        ({**DEEPSPEED, ZERO + "stage": 1, ZERO + "allgather_bucket_size": 7}, ZERO + "allgather_bucket_size")
    ],
    "zero_groups_exclude_tensor_parallel": [
        (
            {**DEEPSPEED, **gpus(4, "policy"), "trainer.policy.tensor_parallel_size": 2, ZERO + name: value},
            ZERO + name,
        )
        for name, value in (("zero_hpz_partition_size", 2), ("zero_quantized_gradients", True))
    ],
    "hpz_size_divides_ranks": [
        (
            {
                **DEEPSPEED,
                **APART,
                "trainer.placement.policy_num_gpus_per_node": 4,
                ZERO + "zero_hpz_partition_size": 3,
            },
            ZERO + "zero_hpz_partition_size",
        )
    ],
    "deepspeed_quantization_needs_cuda": [
        ({**DEEPSPEED, ZERO + "zero_quantized_weights": True}, ZERO + "zero_quantized_weights"),
        ({**DEEPSPEED, ZERO + "zero_quantized_gradients": True}, ZERO + "zero_quantized_gradients"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "learning_rates_suit_fine_tuning": {f"trainer.policy.{RATE}": 0.1, f"trainer.critic.{RATE}": 0.0},
    "optimizer_settings_are_plausible": {DECAY: 1.0, EPSILON: 1e-5, BETAS: [0.9, 0.9]},
    "fsdp_size_divides_ranks": {**gpus(8, "policy"), "trainer.policy.fsdp_config.fsdp_size": 4},
    "reshard_degree_divides_ranks": {
        **gpus(8, "policy"),
        "trainer.policy.fsdp_config.fsdp_size": 4,
        "trainer.policy.fsdp_config.reshard_after_forward": 2,
    },
    "adapter_initialization_is_supported": {**LORA, INIT: "orthogonal"},
    "nvme_offload_needs_folder": {
        "trainer.strategy": "deepspeed",
        ZERO + "offload_optimizer.device": "nvme",
        ZERO + "offload_optimizer.nvme_path": "/drive",
    },
    "cpu_adam_needs_cpu_state": {
        **DEEPSPEED,
        OPTIMIZER: "cpu_adamw",
        ZERO + "offload_optimizer.device": "cpu",
    },
    "lora_modules_are_listed": {**LORA, "trainer.policy.model.lora.exclude_modules": ["q_proj"]},
    "wrap_policy_names_classes": {WRAP: {"transformer_layer_cls_to_wrap": ["QwenDecoderLayer"]}},
    "gradient_prescaling_fits_stage": {**DEEPSPEED, PRESCALE: True, ZERO + "stage": 0},
    "gather_buckets_are_aligned": {**DEEPSPEED, ZERO + "stage": 1, ZERO + "allgather_bucket_size": 8},
    "zero_groups_exclude_tensor_parallel": {
        **DEEPSPEED,
        **gpus(4, "policy"),
        "trainer.policy.tensor_parallel_size": 2,
        ZERO + "zero_hpz_partition_size": 2,
        ZERO + "stage": 2,  # which reads neither
    },
    "hpz_size_divides_ranks": {
        **DEEPSPEED,
        **APART,
        "trainer.placement.policy_num_gpus_per_node": 4,
        ZERO + "zero_hpz_partition_size": 2,
    },
    "deepspeed_quantization_needs_cuda": {**DEEPSPEED, "trainer.device": "cuda", ZERO + "zero_quantized_weights": True},
}
