"""Cases of the checks in `skyrl.config.checks.sampling`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases.settings import VLLM

EXTRA = "generator.sampling_params.additional_kwargs"

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "evaluation_samples_differ": [({"generator.eval_n_samples_per_prompt": 4}, "generator.eval_n_samples_per_prompt")],
    "learner_temperature_matches_sampling": [({"trainer.algorithm.temperature": 0.9}, "trainer.algorithm.temperature")],
    "training_samples_are_random": [
        ({"generator.sampling_params.temperature": 0}, "generator.sampling_params.temperature")
    ],
    "learner_can_score_samples": [
        ({"generator.sampling_params.repetition_penalty": 1.1}, "generator.sampling_params.repetition_penalty"),
        ({"generator.sampling_params.frequency_penalty": 0.5}, "generator.sampling_params.frequency_penalty"),
        ({"generator.sampling_params.min_new_tokens": 1}, "generator.sampling_params.min_new_tokens"),
    ],
    "input_length_covers_prompt": [
        ({"generator.max_input_length": 511}, "generator.max_input_length"),
        ({"generator.max_input_length": 513}, "generator.max_input_length"),
        ({"generator.max_input_length": 511, "generator.max_turns": 2}, "generator.max_input_length"),
    ],
    "engine_has_sampling_arguments": [
        ({"generator.sampling_params.additional_kwargs": {"min_tokens": 2}}, EXTRA),  # torch has none
        ({**VLLM, "generator.sampling_params.additional_kwargs": {"best_of": 2}}, EXTRA),
        (
            {**VLLM, "generator.eval_sampling_params.additional_kwargs": {"min_token": 2}},
            "generator.eval_sampling_params.additional_kwargs",
        ),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "evaluation_samples_differ": {
        "generator.eval_n_samples_per_prompt": 4,
        "generator.eval_sampling_params.temperature": 0.6,
    },
    "learner_temperature_matches_sampling": {
        "trainer.algorithm.temperature": 0.9,
        "generator.sampling_params.temperature": 0.9,
    },
    "training_samples_are_random": {"generator.eval_sampling_params.temperature": 0.0},
    "learner_can_score_samples": {"generator.eval_sampling_params.repetition_penalty": 1.1},
    "input_length_covers_prompt": {"generator.max_input_length": 2000, "generator.max_turns": 2},
    "engine_has_sampling_arguments": {**VLLM, EXTRA: {"min_tokens": 2}},
}
