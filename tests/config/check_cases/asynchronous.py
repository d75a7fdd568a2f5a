"""Cases of the checks in `skyrl.config.checks.asynchronous`."""

from __future__ import annotations

from typing import Any

ASYNC = "trainer.fully_async."
ON: dict[str, Any] = {ASYNC + "enabled": True, "trainer.algorithm.policy_loss_type": "decoupled"}
KEPT: dict[str, Any] = {**ON, ASYNC + "clear_kv_cache_on_weight_sync": False}

INTERPOLATED = "trainer.algorithm.old_logprobs"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "queue_holds_one_batch": [({**ON, ASYNC + "queue_size": 100}, ASYNC + "queue_size")],
    "sync_interval_within_staleness_bound": [
        ({**ON, ASYNC + "steps_per_sync": 6}, ASYNC + "steps_per_sync"),
        ({**ON, ASYNC + "steps_per_sync": 2, ASYNC + "max_staleness_steps": 0}, ASYNC + "steps_per_sync"),
    ],
    "asynchronous_excludes_batched_sampling": [({**ON, "generator.batched": True}, "generator.batched")],
    "stream_has_no_last_batch": [({**ON, "data.epoch_tail": "short"}, "data.epoch_tail")],
    "kept_cache_excludes_prefix_caching": [
        (
            {
                **KEPT,
                "generator.inference_engine.backend": "vllm",
                "generator.inference_engine.enable_prefix_caching": True,
            },
            ASYNC + "clear_kv_cache_on_weight_sync",
        ),
    ],
    "kept_cache_needs_awake_engine": [
        (
            {
                **KEPT,
                "generator.inference_engine.backend": "vllm",
                "generator.inference_engine.enable_prefix_caching": False,
            },
            ASYNC + "clear_kv_cache_on_weight_sync",
        ),
    ],
    "interpolation_needs_stale_samples": [
        ({INTERPOLATED: "interpolated"}, INTERPOLATED),
        ({**ON, INTERPOLATED: "interpolated", ASYNC + "max_staleness_steps": 1}, INTERPOLATED),
    ],
    "stale_samples_are_corrected": [({ASYNC + "enabled": True}, "trainer.algorithm.policy_loss_type")],
}

SILENT: dict[str, dict[str, Any]] = {
    "queue_holds_one_batch": {**ON, ASYNC + "queue_size": 1024},
    "sync_interval_within_staleness_bound": {**ON, ASYNC + "steps_per_sync": 5},
    "asynchronous_excludes_batched_sampling": {"generator.batched": True},
    "stream_has_no_last_batch": {"data.epoch_tail": "short"},
    "kept_cache_excludes_prefix_caching": {
        **KEPT,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.enable_prefix_caching": False,
        "trainer.placement.colocate_all": False,
    },
    "kept_cache_needs_awake_engine": {**KEPT, "generator.inference_engine.backend": "torch"},
    "interpolation_needs_stale_samples": {**ON, INTERPOLATED: "interpolated", ASYNC + "max_staleness_steps": 2},
    "stale_samples_are_corrected": {ASYNC + "enabled": True, ASYNC + "max_staleness_steps": 0},
}
