"""Cases of the checks in `skyrl.config.checks.asynchronous`."""

from __future__ import annotations

from typing import Any

ASYNC = "trainer.fully_async."
ON: dict[str, Any] = {ASYNC + "enabled": True, "trainer.algorithm.policy_loss_type": "decoupled"}
KEPT: dict[str, Any] = {**ON, ASYNC + "clear_kv_cache_on_weight_sync": False}

INTERPOLATED = "trainer.algorithm.old_logprobs"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "a_queue_holds_a_batch": [({**ON, ASYNC + "queue_size": 100}, ASYNC + "queue_size")],
    "weights_travel_before_samples_are_too_old": [
        ({**ON, ASYNC + "steps_per_sync": 6}, ASYNC + "steps_per_sync"),
        ({**ON, ASYNC + "steps_per_sync": 2, ASYNC + "max_staleness_steps": 0}, ASYNC + "steps_per_sync"),
    ],
    "a_stream_is_not_one_call": [({**ON, "generator.batched": True}, "generator.batched")],
    "a_stream_has_no_last_batch": [({**ON, "data.epoch_tail": "short"}, "data.epoch_tail")],
    "kept_keys_and_values_are_not_shared": [
        (
            {
                **KEPT,
                "generator.inference_engine.backend": "vllm",
                "generator.inference_engine.enable_prefix_caching": True,
            },
            ASYNC + "clear_kv_cache_on_weight_sync",
        ),
    ],
    "kept_keys_and_values_outlive_the_engines_sleep": [
        (
            {
                **KEPT,
                "generator.inference_engine.backend": "vllm",
                "generator.inference_engine.enable_prefix_caching": False,
            },
            ASYNC + "clear_kv_cache_on_weight_sync",
        ),
    ],
    "there_is_something_to_interpolate": [
        ({INTERPOLATED: "interpolated"}, INTERPOLATED),
        ({**ON, INTERPOLATED: "interpolated", ASYNC + "max_staleness_steps": 1}, INTERPOLATED),
    ],
    "older_samples_are_corrected": [({ASYNC + "enabled": True}, "trainer.algorithm.policy_loss_type")],
}

SILENT: dict[str, dict[str, Any]] = {
    "a_queue_holds_a_batch": {**ON, ASYNC + "queue_size": 1024},
    "weights_travel_before_samples_are_too_old": {**ON, ASYNC + "steps_per_sync": 5},
    "a_stream_is_not_one_call": {"generator.batched": True},
    "a_stream_has_no_last_batch": {"data.epoch_tail": "short"},
    "kept_keys_and_values_are_not_shared": {
        **KEPT,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.enable_prefix_caching": False,
        "trainer.placement.colocate_all": False,
    },
    "kept_keys_and_values_outlive_the_engines_sleep": {**KEPT, "generator.inference_engine.backend": "torch"},
    "there_is_something_to_interpolate": {**ON, INTERPOLATED: "interpolated", ASYNC + "max_staleness_steps": 2},
    "older_samples_are_corrected": {ASYNC + "enabled": True, ASYNC + "max_staleness_steps": 0},
}
