"""Cases of the checks in `skyrl.config.checks.megatron`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import CRITIC, LORA, MEGATRON

MUON = {"trainer.policy.optimizer_config.optimizer": "muon"}
DROPPING = {"trainer.policy.use_dropout": True}
DROPOUT = "trainer.policy.model.lora.dropout"
CRITICS_RULE = "trainer.critic.optimizer_config.optimizer"
OFFLOADING = {"trainer.offload_activations": True}
TABLE = "trainer.policy.megatron_config."
EXPERT, DISPATCHER = TABLE + "expert_model_parallel_size", TABLE + "moe_token_dispatcher_type"
SCORE, BIAS = TABLE + "moe_router_score_function", TABLE + "moe_router_enable_expert_bias"
PROFILER = TABLE + "torch_profiler_config."
KWARGS = TABLE + "optimizer_config_kwargs."

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "megatron_needs_cuda": [(MEGATRON, "trainer.strategy")],
    "megatron_needs_adam_or_sgd": [
        ({**MEGATRON, **MUON}, "trainer.policy.optimizer_config.optimizer"),
        ({**MEGATRON, **CRITIC, CRITICS_RULE: "muon"}, CRITICS_RULE),
    ],
    "megatron_has_no_dropout": [
        ({**MEGATRON, **DROPPING}, "trainer.policy.use_dropout"),
        ({**MEGATRON, **LORA, DROPOUT: 0.1}, DROPOUT),
        ({**MEGATRON, **CRITIC, "trainer.critic.use_dropout": True}, "trainer.critic.use_dropout"),
    ],
    "megatron_offloads_no_activations": [({**MEGATRON, **OFFLOADING}, "trainer.offload_activations")],
    "expert_degrees_divide_stage_ranks": [
        ({**MEGATRON, EXPERT: 3}, EXPERT),
        ({**MEGATRON, TABLE + "expert_tensor_parallel_size": 3}, TABLE + "expert_tensor_parallel_size"),
    ],
    "flex_dispatch_needs_expert_parallel": [({**MEGATRON, DISPATCHER: "flex"}, DISPATCHER)],
    "megatron_supports_router": [
        ({**MEGATRON, SCORE: "sqrtsoftplus"}, SCORE),
        ({**MEGATRON, BIAS: True}, BIAS),
        ({**MEGATRON, BIAS: True, SCORE: "softmax"}, BIAS),
    ],
    "profiler_has_ranks_and_path": [
        ({**MEGATRON, PROFILER + "enable": True, PROFILER + "save_path": "traces"}, PROFILER + "ranks"),
        ({**MEGATRON, PROFILER + "enable": True, PROFILER + "ranks": [0]}, PROFILER + "save_path"),
        (
            {**MEGATRON, PROFILER + "enable": True, PROFILER + "ranks": [0], PROFILER + "save_path": "s3://x"},
            PROFILER + "save_path",
        ),
    ],
    "optimizer_kwargs_have_no_field": [
        ({**MEGATRON, KWARGS + name: 1}, KWARGS + name) for name in ("lr", "adam_beta1", "clip_grad", "bf16")
    ],
    "gather_overlap_needs_reduce_overlap": [
        (
            {**MEGATRON, "trainer.policy.megatron_config.ddp_config.overlap_param_gather": True},
            "trainer.policy.megatron_config.ddp_config.overlap_param_gather",
        )
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "optimizer_kwargs_have_no_field": {**MEGATRON, KWARGS + "optimizer_cpu_offload": True},
    "megatron_needs_cuda": {**MEGATRON, "trainer.device": "cuda"},
    "megatron_needs_adam_or_sgd": MUON,
    "megatron_has_no_dropout": {**MEGATRON, DROPOUT: 0.1},
    "megatron_offloads_no_activations": OFFLOADING,
    "expert_degrees_divide_stage_ranks": {EXPERT: 3},
    "flex_dispatch_needs_expert_parallel": {DISPATCHER: "flex"},
    "megatron_supports_router": {SCORE: "sqrtsoftplus"},
    "profiler_has_ranks_and_path": {
        **MEGATRON,
        PROFILER + "enable": True,
        PROFILER + "ranks": [0],
        PROFILER + "save_path": "traces",
    },
}
