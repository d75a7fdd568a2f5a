"""Cases of the checks in `skyrl.config.checks.experts`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import MEGATRON, NO_KL, SERVER

AUX, Z = "trainer.policy.router_aux_loss_coef", "trainer.policy.router_z_loss_coef"
REENTRANT = {"trainer.recompute_activations": True, "trainer.gradient_checkpointing_use_reentrant": True}
REPLAYED = "trainer.policy.moe_enable_routing_replay"
REPLAY, RETURNED = {REPLAYED: True}, {"generator.inference_engine.enable_return_routed_experts": True}
WHERE = "trainer.gradient_checkpointing_use_reentrant"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "routers_learn_in_transformers_layers": [({**MEGATRON, AUX: 0.01}, AUX), ({**MEGATRON, Z: 0.01}, Z)],
    "replayed_experts_are_returned": [
        (REPLAY, REPLAYED),
        ({**REPLAY, **RETURNED, **MEGATRON}, REPLAYED),
        ({**REPLAY, **SERVER}, REPLAYED),
        ({"trainer.ref.moe_enable_routing_replay": True}, "trainer.ref.moe_enable_routing_replay"),
    ],
    "routers_are_reached_by_gradients": [({**REENTRANT, AUX: 0.01}, WHERE), ({**REENTRANT, Z: 0.01}, WHERE)],
}

SILENT: dict[str, dict[str, Any]] = {
    "routers_learn_in_transformers_layers": {"trainer.strategy": "deepspeed", AUX: 0.01, Z: 0.01},
    "replayed_experts_are_returned": {**REPLAY, **RETURNED, **NO_KL, "trainer.ref.moe_enable_routing_replay": True},
    "routers_are_reached_by_gradients": {"trainer.recompute_activations": True, AUX: 0.01, Z: 0.01},
}
