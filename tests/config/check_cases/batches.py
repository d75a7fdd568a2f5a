"""Cases of the checks in `skyrl.config.checks.batches`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import CRITIC, MEGATRON, NO_KL, gpus, split

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "mini_batch_divides_batch": [({"trainer.policy_mini_batch_size": 300}, "trainer.policy_mini_batch_size")],
    "critic_mini_batch_divides_batch": [
        (
            {"trainer.critic_mini_batch_size": 300, "trainer.critic.model.path": "critic"},
            "trainer.critic_mini_batch_size",
        )
    ],
    "micro_batch_divides_mini_batch": [
        ({"trainer.micro_train_batch_size_per_gpu": 3}, "trainer.micro_train_batch_size_per_gpu"),
        # 1,280 samples on 8 ranks are 160 for each, which 64 does not divide though it divides 1,280
        ({**gpus(8, "policy"), "trainer.micro_train_batch_size_per_gpu": 64}, "trainer.micro_train_batch_size_per_gpu"),
        # the policy's 1,280 are a multiple of 256, the critic's 128 x 5 = 640 are not
        (
            {
                **CRITIC,
                "trainer.critic_mini_batch_size": 128,
                "trainer.micro_train_batch_size_per_gpu": 256,
            },
            "trainer.micro_train_batch_size_per_gpu",
        ),
    ],
    "synthetic_samples_stand_alone": [
        ({"trainer.num_dummy_steps": 1, "trainer.rollouts_from": "elsewhere"}, "trainer.num_dummy_steps"),
        ({"trainer.num_dummy_steps": 1, "trainer.ref.moe_enable_routing_replay": True}, "trainer.num_dummy_steps"),
    ],
    "ranks_form_whole_groups": [
        (
            {**gpus(6, role), **CRITIC, f"trainer.{role}.sequence_parallel_size": 4},
            f"trainer.{role}.sequence_parallel_size",
        )
        for role in ("policy", "critic", "ref")
    ]
    + [
        ({**gpus(6, "ref"), "trainer.ref.tensor_parallel_size": 4}, "trainer.ref.tensor_parallel_size"),
        (
            {**gpus(6, "ref"), "trainer.ref.tensor_parallel_size": 2, "trainer.ref.context_parallel_size": 4},
            "trainer.ref.context_parallel_size",
        ),
        (
            {**gpus(8, "ref"), "trainer.ref.tensor_parallel_size": 4, "trainer.ref.sequence_parallel_size": 4},
            "trainer.ref.sequence_parallel_size",
        ),
        ({**MEGATRON, **gpus(12, "policy"), **split(2, 2, 2)}, "trainer.policy.megatron_config"),
        (
            {**MEGATRON, **gpus(3, "ref"), "trainer.ref.megatron_config.tensor_model_parallel_size": 2},
            "trainer.ref.megatron_config",
        ),
    ],
    "mini_batch_divides_over_ranks": [
        (gpus(3, "policy"), "trainer.policy_mini_batch_size"),
        ({**gpus(3, "critic"), **CRITIC}, "trainer.critic_mini_batch_size"),
        # fewer samples than ranks
        (
            {**gpus(8, "policy"), "trainer.policy_mini_batch_size": 1, "trainer.train_batch_size": 8},
            "trainer.policy_mini_batch_size",
        ),
        # 1,280 samples go to 4 groups of 3 ranks that share sequences, but not to 12 ranks
        (gpus(12, "policy"), "trainer.policy_mini_batch_size"),
    ],
    "scoring_shares_are_equal": [
        (gpus(3, "ref"), "trainer.train_batch_size"),
        ({**gpus(3, "teacher"), "trainer.teacher.model.path": "teacher"}, "trainer.train_batch_size"),
    ],
    "mini_batch_units_agree": [
        ({f"trainer.{role}_mini_batch_size_in_samples": 5}, f"trainer.{role}_mini_batch_size_in_samples")
        for role in ("policy", "critic")
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "synthetic_samples_stand_alone": {"trainer.num_dummy_steps": 1},
    "mini_batch_divides_batch": {"trainer.policy_mini_batch_size": 512},
    "critic_mini_batch_divides_batch": {"trainer.critic_mini_batch_size": 300},
    "micro_batch_divides_mini_batch": {"trainer.micro_train_batch_size_per_gpu": 5},
    "ranks_form_whole_groups": {
        **NO_KL,
        **gpus(6, "policy", "critic", "ref"),
        "trainer.policy.sequence_parallel_size": 3,
        "trainer.policy.tensor_parallel_size": 2,
        "trainer.critic.sequence_parallel_size": 4,  # there is no critic
        "trainer.ref.sequence_parallel_size": 4,  # and no reference
        "trainer.policy.megatron_config.tensor_model_parallel_size": 4,  # and no Megatron
    },
    "mini_batch_divides_over_ranks": {
        **gpus(12, "policy"),
        "trainer.policy.sequence_parallel_size": 3,  # 1,280 samples go to 4 groups
        **gpus(3, "critic"),  # there is none
    },
    "scoring_shares_are_equal": {**gpus(6, "ref"), "trainer.ref.sequence_parallel_size": 3},
    "mini_batch_units_agree": {
        "trainer.policy_mini_batch_size": 256,
        "generator.n_samples_per_prompt": 4,
        "trainer.policy_mini_batch_size_in_samples": 1024,
    },
}
