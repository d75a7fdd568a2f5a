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

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "replayed_experts_are_returned": [
        (REPLAY, REPLAYED),
        ({**REPLAY, **SERVER}, REPLAYED),
        ({"trainer.ref.moe_enable_routing_replay": True}, "trainer.ref.moe_enable_routing_replay"),
    ],
    "routers_are_reached_by_gradients": [({**REENTRANT, AUX: 0.01}, WHERE), ({**REENTRANT, Z: 0.01}, WHERE)],
    "routers_of_megatron_take_what_is_replayed": [
        (
            {**MEGATRON_REPLAY, f"{TABLE}.moe_router_load_balancing_type": "sinkhorn"},
            f"{TABLE}.moe_router_load_balancing_type",
        ),
        ({**MEGATRON_REPLAY, KWARGS: {"moe_router_fusion": True}}, f"{KWARGS}.moe_router_fusion"),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "replayed_experts_are_returned": {**REPLAY, **RETURNED, **NO_KL, "trainer.ref.moe_enable_routing_replay": True},
    "routers_of_megatron_take_what_is_replayed": {**MEGATRON_REPLAY, KWARGS: {"moe_router_fusion": False}},
    "routers_are_reached_by_gradients": {"trainer.recompute_activations": True, AUX: 0.01, Z: 0.01},
}
