"""Cases of the checks in `skyrl.config.checks.allocation`."""

from __future__ import annotations

from typing import Any

PATH = "trainer.placement.allocation"
BACKEND = "generator.inference_engine.backend"
SPLIT: dict[str, Any] = {PATH: "vllm:d4+fsdp:d4", BACKEND: "vllm"}

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "allocation_matches_fields": [
        ({**SPLIT, "generator.inference_engine.num_engines": 3}, "generator.inference_engine.num_engines"),
        ({**SPLIT, PATH: "sglang:d4+fsdp:d4"}, BACKEND),
        ({**SPLIT, BACKEND: "sglang"}, BACKEND),
        ({**SPLIT, BACKEND: "torch"}, BACKEND),
        ({**SPLIT, BACKEND: "http"}, BACKEND),
        ({PATH: "sglang:d2|fsdp:d2", BACKEND: "vllm"}, BACKEND),
    ],
    "allocation_has_engines_and_learners": [({PATH: "vllm:d4"}, PATH), ({PATH: "fsdp:d4"}, PATH)],
    "allocation_places_every_model": [
        ({PATH: "vllm:d4+fsdp[critic]:d4"}, PATH),
        ({PATH: "vllm[rollout]:d4+fsdp[actor]:d4|fsdp[judge]:d4"}, PATH),
    ],
    "allocation_degrees_are_supported": [
        ({PATH: "vllm:d4+fsdp:d2p2"}, PATH),
        ({PATH: "vllm:d4+fsdp:(attn:d1t2|ffn:e1t2)"}, PATH),
        ({PATH: "vllm[rollout]:d4+fsdp[actor]:d4|megatron[critic]:d4"}, PATH),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "allocation_matches_fields": {**SPLIT, "generator.inference_engine.num_engines": 4},
    "allocation_has_engines_and_learners": SPLIT,
    "allocation_places_every_model": {PATH: "vllm[rollout]:d4+fsdp[actor]:d4|fsdp[critic]:d4"},
    "allocation_degrees_are_supported": {PATH: "vllm:d4+fsdp:d2t2e2"},
}
