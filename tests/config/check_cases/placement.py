"""Cases of the checks in `skyrl.config.checks.placement`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import (
    APART,
    CRITIC,
    ENGINE,
    MEGATRON,
    PLACEMENT,
    RAY,
    SERVER,
    VLLM,
    gpus,
)

DEGREE = "megatron_config.tensor_model_parallel_size"

ALLOCATION = "trainer.placement.allocation"
BACKEND = "generator.inference_engine.backend"
SPLIT: dict[str, Any] = {ALLOCATION: "vllm:d4+fsdp:d4", BACKEND: "vllm"}
LARGE: dict[str, Any] = {"trainer.policy.model.path": "Qwen/Qwen2.5-72B-Instruct", "trainer.device": "cuda"}
KIND = "trainer.placement.gpu_kind"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "run_fits_gpu_memory": [({**LARGE, KIND: "H100-80"}, "generator.inference_engine.max_num_seqs")],
    "allocation_matches_fields": [
        ({**SPLIT, "generator.inference_engine.num_engines": 3}, "generator.inference_engine.num_engines"),
        ({**SPLIT, ALLOCATION: "sglang:d4+fsdp:d4"}, BACKEND),
        ({**SPLIT, BACKEND: "sglang"}, BACKEND),
        ({**SPLIT, BACKEND: "torch"}, BACKEND),
        ({**SPLIT, BACKEND: "http"}, BACKEND),
        ({ALLOCATION: "sglang:d2|fsdp:d2", BACKEND: "vllm"}, BACKEND),
    ],
    "allocation_has_engines_and_learners": [
        ({ALLOCATION: "vllm:d4"}, ALLOCATION),
        ({ALLOCATION: "fsdp:d4"}, ALLOCATION),
    ],
    "allocation_places_every_model": [
        ({ALLOCATION: "vllm:d4+fsdp[critic]:d4"}, ALLOCATION),
        ({ALLOCATION: "vllm[rollout]:d4+fsdp[actor]:d4|fsdp[judge]:d4"}, ALLOCATION),
    ],
    "allocation_degrees_are_supported": [
        ({ALLOCATION: "vllm:d4+fsdp:d2p2"}, ALLOCATION),
        ({ALLOCATION: "vllm:d4+fsdp:(attn:d1t2|ffn:e1t2)"}, ALLOCATION),
        ({ALLOCATION: "vllm[rollout]:d4+fsdp[actor]:d4|megatron[critic]:d4"}, ALLOCATION),
    ],
    "other_processes_find_code": [
        ({**RAY, "trainer.algorithm.policy_loss_type": "__main__:mine"}, "trainer.algorithm.policy_loss_type"),
        (
            {"environment.skyrl_gym.isolate_user_env": True, "environment.env_class": "__main__:mine"},
            "environment.env_class",
        ),
    ],
    "colocated_models_have_equal_ranks": [
        ({**RAY, **CRITIC, f"{PLACEMENT}{role}_{count}": 2}, f"{PLACEMENT}{role}_{count}")
        for role in ("critic", "ref")
        for count in ("num_nodes", "num_gpus_per_node")
    ]
    + [({**RAY, PLACEMENT + "colocate_all": False, **gpus(2, "ref")}, PLACEMENT + "ref_num_gpus_per_node")],
    "colocated_engines_use_all_gpus": [
        ({**RAY, **gpus(2, "policy")}, ENGINE + "num_engines"),
        ({**VLLM, **gpus(4, "policy"), ENGINE + "tensor_parallel_size": 2}, ENGINE + "num_engines"),
        ({**VLLM, **gpus(4, "policy"), ENGINE + "tensor_parallel_size": 3}, ENGINE + "num_engines"),
    ],
    "external_engines_exclude_colocation": [
        ({**VLLM, ENGINE + "run_engines_locally": False}, PLACEMENT + "colocate_all"),
        ({**VLLM, ENGINE + "external_proxy_url": "http://router"}, PLACEMENT + "colocate_all"),
        (
            {**VLLM, ENGINE + "run_engines_locally": False, ENGINE + "remote_urls": ["host:1"]},
            PLACEMENT + "colocate_all",
        ),
        ({**RAY, ENGINE + "backend": "http"}, PLACEMENT + "colocate_all"),
    ],
    "colocated_engines_release_weights": [
        ({**RAY, "trainer.device": "cuda", ENGINE + "backend": "sglang"}, PLACEMENT + "colocate_all")
    ],
    "external_engines_have_urls": [
        ({ENGINE + "backend": "vllm", ENGINE + "run_engines_locally": False}, ENGINE + "external_server_urls"),
        ({ENGINE + "backend": "http"}, ENGINE + "external_server_urls"),
        ({ENGINE + "backend": "sglang", ENGINE + "run_engines_locally": False}, ENGINE + "external_server_urls"),
    ],
    "external_urls_are_valid": [
        ({**SERVER, ENGINE + "external_server_urls": [url]}, ENGINE + "external_server_urls")
        for url in (
            "ftp://host",
            "http://me:secret@host",
            "http://host/v1",
            "http://",
            "http://host:1?x=1",
            "name:",
            "http://host:99999",
        )
    ]
    + [
        (
            {**SERVER, ENGINE + "external_server_urls": ["http://host:1", "http://host:1/"]},
            ENGINE + "external_server_urls",
        ),
        ({ENGINE + "backend": "http", ENGINE + "remote_urls": ["ho st:1"]}, ENGINE + "remote_urls"),
        ({**SERVER, ENGINE + "external_proxy_url": "router"}, ENGINE + "external_proxy_url"),
    ],
    "num_external_engines_matches_urls": [({**SERVER, ENGINE + "num_engines": 2}, ENGINE + "num_engines")],
    "embedded_engine_is_not_external": [
        ({ENGINE + "run_engines_locally": False}, ENGINE + "backend"),
        ({ENGINE + "external_proxy_url": "http://host:1"}, ENGINE + "backend"),
    ],
    "engine_expert_parallel_spans_gpus": [
        ({**VLLM, ENGINE + "expert_parallel_size": 2}, ENGINE + "expert_parallel_size"),
        # pipeline stages hold different experts
        (
            {
                **VLLM,
                ENGINE + "expert_parallel_size": 4,
                ENGINE + "tensor_parallel_size": 2,
                ENGINE + "pipeline_parallel_size": 2,
            },
            ENGINE + "expert_parallel_size",
        ),
    ],
    "mp_engine_has_one_node": [
        (
            {
                **VLLM,
                PLACEMENT + "policy_num_nodes": 2,
                ENGINE + "distributed_executor_backend": "mp",
                ENGINE + "tensor_parallel_size": 2,
            },
            ENGINE + "distributed_executor_backend",
        ),
        # engine 1 of 3 would have GPUs 4 and 5 of node 0 and 0 and 1 of node 1
        (
            {
                **VLLM,
                **gpus(6, "policy"),
                PLACEMENT + "policy_num_nodes": 2,
                ENGINE + "distributed_executor_backend": "mp",
                ENGINE + "tensor_parallel_size": 4,
                ENGINE + "num_engines": 3,
            },
            ENGINE + "distributed_executor_backend",
        ),
    ],
    "run_fits_cluster": [
        ({**VLLM, ENGINE + "num_engines": 2**17}, "trainer.placement"),
        ({**VLLM, ENGINE + "tensor_parallel_size": 2**62}, "trainer.placement"),
        ({**APART, **gpus(2**63 - 1, "policy")}, "trainer.placement"),
        ({**APART, "trainer.placement.ref_num_nodes": 2**40}, "trainer.placement"),
    ],
    "one_process_has_one_rank": [
        ({"trainer.placement.executor": "in_process", path: 2}, path)
        for path in (
            "trainer.placement.policy_num_nodes",
            "trainer.placement.policy_num_gpus_per_node",
            "trainer.placement.ref_num_nodes",
            "trainer.placement.ref_num_gpus_per_node",
            "generator.inference_engine.num_engines",
        )
    ]
    + [
        ({PLACEMENT + "executor": "in_process", **CRITIC, **gpus(2, "critic")}, PLACEMENT + "critic_num_gpus_per_node"),
        (
            {PLACEMENT + "executor": "in_process", ENGINE + "backend": "vllm", ENGINE + "tensor_parallel_size": 2},
            ENGINE + "tensor_parallel_size",
        ),
    ],
    "colocated_models_share_megatron_degrees": [
        ({**MEGATRON, f"trainer.{model}.{DEGREE}": 2}, f"trainer.ref.{DEGREE}") for model in ("policy", "ref")
    ]
    + [({**MEGATRON, **CRITIC, f"trainer.critic.{DEGREE}": 2}, f"trainer.critic.{DEGREE}")],
}

SILENT: dict[str, dict[str, Any]] = {
    "run_fits_gpu_memory": LARGE,
    "allocation_matches_fields": {**SPLIT, "generator.inference_engine.num_engines": 4},
    "allocation_has_engines_and_learners": SPLIT,
    "allocation_places_every_model": {ALLOCATION: "vllm[rollout]:d4+fsdp[actor]:d4|fsdp[critic]:d4"},
    "allocation_degrees_are_supported": {ALLOCATION: "vllm:d4+fsdp:d2t2e2"},
    "external_urls_are_valid": {
        **SERVER,
        ENGINE + "external_server_urls": ["http://host:1", "https://host:1/", "http://[::1]:8000", "name:engines/0"],
    },
    "num_external_engines_matches_urls": {
        **SERVER,
        ENGINE + "external_server_urls": ["http://host:1", "http://host:2"],
        ENGINE + "num_engines": 2,
    },
    "embedded_engine_is_not_external": SERVER,
    "colocated_models_have_equal_ranks": {**APART, **gpus(2, "ref"), **CRITIC, PLACEMENT + "critic_num_nodes": 3},
    "colocated_engines_use_all_gpus": {
        **VLLM,
        **gpus(8, "policy"),
        ENGINE + "tensor_parallel_size": 2,
        ENGINE + "pipeline_parallel_size": 2,
        ENGINE + "data_parallel_size": 2,
    },
    "external_engines_exclude_colocation": {**APART, ENGINE + "run_engines_locally": False},
    "external_engines_have_urls": {ENGINE + "backend": "http", ENGINE + "external_proxy_url": "http://router"},
    "engine_expert_parallel_spans_gpus": {
        **VLLM,
        ENGINE + "expert_parallel_size": 4,
        ENGINE + "tensor_parallel_size": 2,
        ENGINE + "data_parallel_size": 2,
    },
    "mp_engine_has_one_node": {
        **VLLM,
        **gpus(8, "policy"),
        PLACEMENT + "policy_num_nodes": 2,
        ENGINE + "distributed_executor_backend": "mp",
        ENGINE + "tensor_parallel_size": 4,
        ENGINE + "num_engines": 4,
    },
    "run_fits_cluster": {**VLLM, ENGINE + "num_engines": 2**17 - 2},  # and a rank of the policy and the reference
    "one_process_has_one_rank": {"trainer.placement.policy_num_nodes": 2},
    "colocated_models_share_megatron_degrees": {**MEGATRON, **APART, f"trainer.ref.{DEGREE}": 2},
}
