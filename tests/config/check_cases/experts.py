"""Cases of the checks in `skyrl.config.checks.experts`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import MEGATRON, NO_KL, SERVER

AUX, Z = "trainer.policy.router_aux_loss_coef", "trainer.policy.router_z_loss_coef"
REENTRANT = {"trainer.recompute_activations": True, "trainer.gradient_checkpointing_use_reentrant": True}
REPLAYED = "trainer.policy.moe_enable_routing_replay"
REPLAY, RETURNED = {REPLAYED: True}, {"generator.inference_engine.enable_return_routed_experts": True}
TABLE = "trainer.policy.megatron_config"
KWARGS = f"{TABLE}.transformer_config_kwargs"
MEGATRON_REPLAY = {**REPLAY, **RETURNED, **MEGATRON}
WHERE = "trainer.gradient_checkpointing_use_reentrant"

SCORE, BIAS = f"{TABLE}.moe_router_score_function", f"{TABLE}.moe_router_enable_expert_bias"
BALANCING = f"{TABLE}.moe_router_load_balancing_type"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "replay_needs_returned_experts": [
        (REPLAY, REPLAYED),
        ({**REPLAY, **SERVER}, REPLAYED),
        ({"trainer.ref.moe_enable_routing_replay": True}, "trainer.ref.moe_enable_routing_replay"),
    ],
    "routers_receive_gradients": [({**REENTRANT, AUX: 0.01}, WHERE), ({**REENTRANT, Z: 0.01}, WHERE)],
    "megatron_routers_support_replay": [
        (
            {**MEGATRON_REPLAY, f"{TABLE}.moe_router_load_balancing_type": "sinkhorn"},
            f"{TABLE}.moe_router_load_balancing_type",
        ),
        ({**MEGATRON_REPLAY, KWARGS: {"moe_router_fusion": True}}, f"{KWARGS}.moe_router_fusion"),
    ],
    "router_matches_model_config": [
        ({**MEGATRON, SCORE: "sigmoid"}, SCORE),
        ({**MEGATRON, SCORE: "sigmoid", BIAS: True}, SCORE),
        ({**MEGATRON, BALANCING: "sinkhorn"}, BALANCING),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "replay_needs_returned_experts": {**REPLAY, **RETURNED, **NO_KL, "trainer.ref.moe_enable_routing_replay": True},
    "megatron_routers_support_replay": {**MEGATRON_REPLAY, KWARGS: {"moe_router_fusion": False}},
    "routers_receive_gradients": {"trainer.recompute_activations": True, AUX: 0.01, Z: 0.01},
    "router_matches_model_config": {**MEGATRON, BALANCING: "aux_loss", SCORE: "softmax"},
}
