"""Cases of the checks in `skyrl.config.checks.models`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import APART, CRITIC, LORA, gpus

DEEPSPEED: dict[str, Any] = {"trainer.strategy": "deepspeed"}
ZERO = "trainer.policy.deepspeed_config.zero_optimization."
PRESCALE = "trainer.policy.deepspeed_config.prescale_gradients"
PRECISION = "trainer.policy.fsdp_config.mixed_precision."
WRAP = "trainer.policy.fsdp_config.wrap_policy"
OPTIMIZER = "trainer.policy.optimizer_config.optimizer"
INIT = "trainer.policy.model.lora.init_method"

RATE = "optimizer_config.lr"
DECAY, EPSILON, BETAS = (
    f"trainer.policy.optimizer_config.{name}" for name in ("weight_decay", "adam_eps", "adam_betas")
)

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "learning_rates_are_those_of_fine_tuning": [
        ({**CRITIC, f"trainer.{model}.{RATE}": rate}, f"trainer.{model}.{RATE}")
        for model in ("policy", "critic")
        for rate in (10.0, 1.5, 0.0)
    ],
    "the_optimizer_is_set_within_its_range": [
        ({DECAY: 10.0}, DECAY),
        ({EPSILON: 1.0}, EPSILON),
        ({BETAS: [0.999, 0.9]}, BETAS),
    ],
    "copies_of_the_weights_are_whole": [
        (
            {**CRITIC, **gpus(8, role), f"trainer.{role}.fsdp_config.fsdp_size": size},
            f"trainer.{role}.fsdp_config.fsdp_size",
        )
        for role, size in (("policy", 3), ("critic", 16), ("ref", 5))
    ],
    "weights_stay_sharded_over_part_of_a_copy": [
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
    "adapters_start_in_a_way_that_runs": [
        ({**LORA, INIT: "pissa"}, INIT),
        ({"trainer.policy.model.lora.rank": 3, INIT: "orthogonal"}, INIT),
    ],
    "state_on_a_drive_has_a_folder": [
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
    "adapters_that_do_not_learn_are_stored": [
        ({"trainer.ref.model.lora.rank": 4}, "trainer.ref.model.lora.rank"),
    ],
    "adapters_have_weights_below_them": [
        ({**LORA, "trainer.policy.model.init_from_scratch": True}, "trainer.policy.model.init_from_scratch"),
    ],
    "matrices_are_whole_where_muon_steps": [
        ({**DEEPSPEED, OPTIMIZER: "muon"}, OPTIMIZER),
    ],
    "the_kernel_for_cpu_memory_finds_the_state_there": [
        ({OPTIMIZER: "cpu_adamw"}, OPTIMIZER),
        ({**DEEPSPEED, OPTIMIZER: "cpu_adamw"}, OPTIMIZER),
        ({**DEEPSPEED, OPTIMIZER: "cpu_adamw", ZERO + "offload_optimizer.device": "cpu", ZERO + "stage": 0}, OPTIMIZER),
    ],
    "modules_are_named_in_a_list": [
        ({**LORA, "trainer.policy.model.lora.exclude_modules": "q_proj"}, "trainer.policy.model.lora.exclude_modules"),
        ({**LORA, "trainer.policy.model.lora.target_modules": "q_proj"}, "trainer.policy.model.lora.target_modules"),
        ({**LORA, "trainer.policy.model.lora.target_modules": "*_proj"}, "trainer.policy.model.lora.target_modules"),
    ],
    "units_of_sharding_are_named_as_fsdp_reads_them": [
        ({WRAP: {"min_num_params": 100}}, WRAP),
        ({WRAP: {"transformer_layer_cls_to_wrap": [1]}}, WRAP),
    ],
    "gradients_are_divided_where_deepspeed_can": [
        ({**DEEPSPEED, PRESCALE: True}, PRESCALE),
        ({**DEEPSPEED, PRESCALE: True, ZERO + "stage": 2}, PRESCALE),
    ],
    "buckets_of_weights_are_aligned": [
        ({**DEEPSPEED, ZERO + "stage": 1, ZERO + "allgather_bucket_size": 7}, ZERO + "allgather_bucket_size")
    ],
    "groups_of_deepspeed_have_the_same_matrices": [
        (
            {**DEEPSPEED, **gpus(4, "policy"), "trainer.policy.tensor_parallel_size": 2, ZERO + name: value},
            ZERO + name,
        )
        for name, value in (("zero_hpz_partition_size", 2), ("zero_quantized_gradients", True))
    ],
    "second_copies_of_the_weights_are_whole": [
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
    "integers_are_made_on_gpus": [
        ({**DEEPSPEED, ZERO + "zero_quantized_weights": True}, ZERO + "zero_quantized_weights"),
        ({**DEEPSPEED, ZERO + "zero_quantized_gradients": True}, ZERO + "zero_quantized_gradients"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "learning_rates_are_those_of_fine_tuning": {f"trainer.policy.{RATE}": 0.1, f"trainer.critic.{RATE}": 0.0},
    "the_optimizer_is_set_within_its_range": {DECAY: 1.0, EPSILON: 1e-5, BETAS: [0.9, 0.9]},
    "copies_of_the_weights_are_whole": {**gpus(8, "policy"), "trainer.policy.fsdp_config.fsdp_size": 4},
    "weights_stay_sharded_over_part_of_a_copy": {
        **gpus(8, "policy"),
        "trainer.policy.fsdp_config.fsdp_size": 4,
        "trainer.policy.fsdp_config.reshard_after_forward": 2,
    },
    "adapters_start_in_a_way_that_runs": {**LORA, INIT: "orthogonal"},
    "state_on_a_drive_has_a_folder": {
        "trainer.strategy": "deepspeed",
        ZERO + "offload_optimizer.device": "nvme",
        ZERO + "offload_optimizer.nvme_path": "/drive",
    },
    "the_kernel_for_cpu_memory_finds_the_state_there": {
        **DEEPSPEED,
        OPTIMIZER: "cpu_adamw",
        ZERO + "offload_optimizer.device": "cpu",
    },
    "modules_are_named_in_a_list": {**LORA, "trainer.policy.model.lora.exclude_modules": ["q_proj"]},
    "units_of_sharding_are_named_as_fsdp_reads_them": {WRAP: {"transformer_layer_cls_to_wrap": ["QwenDecoderLayer"]}},
    "gradients_are_divided_where_deepspeed_can": {**DEEPSPEED, PRESCALE: True, ZERO + "stage": 0},
    "buckets_of_weights_are_aligned": {**DEEPSPEED, ZERO + "stage": 1, ZERO + "allgather_bucket_size": 8},
    "groups_of_deepspeed_have_the_same_matrices": {
        **DEEPSPEED,
        **gpus(4, "policy"),
        "trainer.policy.tensor_parallel_size": 2,
        ZERO + "zero_hpz_partition_size": 2,
        ZERO + "stage": 2,  # which reads neither
    },
    "second_copies_of_the_weights_are_whole": {
        **DEEPSPEED,
        **APART,
        "trainer.placement.policy_num_gpus_per_node": 4,
        ZERO + "zero_hpz_partition_size": 2,
    },
    "integers_are_made_on_gpus": {**DEEPSPEED, "trainer.device": "cuda", ZERO + "zero_quantized_weights": True},
}
