"""Cases of the checks in `skyrl.config.checks.learners`."""

from __future__ import annotations

from typing import Any

from skyrl.config.checks.models import WITHOUT_FIELDS
from tests.config.check_cases.settings import CRITIC, LORA, MEGATRON

REENTRANT = "trainer.gradient_checkpointing_use_reentrant"

DROPOUT, CRITIC_DROPOUT = "trainer.policy.use_dropout", "trainer.critic.use_dropout"
ADAPTER_DROPOUT = "trainer.policy.model.lora.dropout"
ONE_UPDATE = {
    "trainer.train_batch_size": 64,
    "trainer.policy_mini_batch_size": 64,
    "trainer.critic_mini_batch_size": 64,
}
SCRATCH = "trainer.policy.model.init_from_scratch"
TEACHER = {"trainer.teacher.model.path": "teacher"}
DISTILLATION_TYPE = "trainer.algorithm.distillation.type"
SOURCES, SERVED_SOURCES = "trainer.teacher.sources", "trainer.teacher.endpoint.sources"
SERVED = {"trainer.teacher.endpoint.url": "http://10.0.0.5:8000"}
TOP_K, TOP_K_OF, TAIL, BETA = (
    f"trainer.algorithm.distillation.{name}" for name in ("top_k", "top_k_of", "tail", "beta")
)
COLD = "trainer.algorithm.distillation.temperature"
SAMPLED_AT = "generator.sampling_params.temperature"
WIDER = {"trainer.policy.model_config_kwargs": {"max_position_embeddings": 4096}}

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "dropout_makes_ratios_noisy": [
        ({DROPOUT: True, "trainer.update_epochs_per_batch": 2}, DROPOUT),
        ({DROPOUT: True, "trainer.algorithm.policy_loss_type": "rollout_is", **ONE_UPDATE}, DROPOUT),
        ({**CRITIC, CRITIC_DROPOUT: True}, CRITIC_DROPOUT),
    ],
    "lora_dropout_makes_ratios_noisy": [
        ({**LORA, ADAPTER_DROPOUT: 0.1, "trainer.update_epochs_per_batch": 2}, ADAPTER_DROPOUT),
        (
            {**CRITIC, "trainer.critic.model.lora.rank": 8, "trainer.critic.model.lora.dropout": 0.1},
            "trainer.critic.model.lora.dropout",
        ),
    ],
    "reference_matches_policy_model": [
        (WIDER, "trainer.ref.model_config_kwargs"),
        ({SCRATCH: True}, "trainer.ref.model.init_from_scratch"),
    ],
    "distributions_exclude_megatron": [({**TEACHER, **MEGATRON, DISTILLATION_TYPE: "loss"}, DISTILLATION_TYPE)],
    "sources_have_one_teacher": [
        ({SOURCES: {"a": "one"}, SERVED_SOURCES: {"a": "http://10.0.0.5:8000"}}, SOURCES),
        ({**MEGATRON, SOURCES: {"a": "one", "b": "two"}}, SOURCES),
    ],
    "served_teachers_give_few_numbers": [
        ({**SERVED, **TEACHER}, "trainer.teacher.endpoint.url"),
        ({**SERVED, SAMPLED_AT: 0.7}, SAMPLED_AT),
        ({**SERVED, DISTILLATION_TYPE: "loss"}, TOP_K),
        ({**SERVED, DISTILLATION_TYPE: "loss", TOP_K: 20, TOP_K_OF: "union"}, TOP_K_OF),
        ({**SERVED, DISTILLATION_TYPE: "loss", TOP_K: 20, COLD: 2.0}, COLD),
    ],
    "missing_tail_needs_forward_divergence": [
        ({**TEACHER, DISTILLATION_TYPE: "loss", TOP_K: 20, TAIL: False, BETA: 0.5}, TAIL)
    ],
    "reference_has_policys_initial_adapter": [
        ({**LORA, "trainer.policy.model.lora.path": "stored"}, "trainer.ref.model.lora.path"),
    ],
    "schedules_are_consistent": [
        ({"trainer.policy.optimizer_config.scheduler": name}, "trainer.policy.optimizer_config.scheduler")
        for name in WITHOUT_FIELDS
    ]
    + [
        (
            {
                "trainer.policy.optimizer_config.num_warmup_steps": 3,
                "trainer.policy.optimizer_config.warmup_steps_proportion": 0.1,
            },
            "trainer.policy.optimizer_config.warmup_steps_proportion",
        )
    ],
    "determinism_is_tested_on_cpu": [
        ({"trainer.deterministic": True, "trainer.device": "cuda"}, "trainer.deterministic")
    ],
    "adapters_exclude_delta_transport": [
        (
            {**LORA, "generator.inference_engine.weight_sync_backend": "delta"},
            "generator.inference_engine.weight_sync_backend",
        ),
    ],
    "adapters_receive_gradients": [
        (
            {**LORA, "trainer.recompute_activations": True, REENTRANT: True},
            REENTRANT,
        ),
    ],
}

SILENT: dict[str, dict[str, Any]] = {
    "reference_has_policys_initial_adapter": {
        **LORA,
        "trainer.policy.model.lora.path": "stored",
        "trainer.ref.model.path": "another",
    },
    "dropout_makes_ratios_noisy": {
        **CRITIC,
        **ONE_UPDATE,
        DROPOUT: True,
        CRITIC_DROPOUT: True,
        "trainer.algorithm.value_clip": None,
    },
    "distributions_exclude_megatron": {**TEACHER, **MEGATRON},
    "sources_have_one_teacher": {
        **MEGATRON,
        SOURCES: {"a": "one", "b": "one"},
        SERVED_SOURCES: {"c": "http://there:8000"},
    },
    "served_teachers_give_few_numbers": {**SERVED, DISTILLATION_TYPE: "loss", TOP_K: 20, TOP_K_OF: "intersection"},
    "missing_tail_needs_forward_divergence": {
        **TEACHER,
        DISTILLATION_TYPE: "loss",
        TOP_K: 20,
        TAIL: False,
        BETA: 0.0,
    },
    "reference_matches_policy_model": {**WIDER, "trainer.ref.model.path": "another"},
    "schedules_are_consistent": {"trainer.policy.optimizer_config.scheduler": "inverse_sqrt"},
    "determinism_is_tested_on_cpu": {"trainer.deterministic": True},
    "adapters_exclude_delta_transport": LORA,
    "adapters_receive_gradients": {**LORA, "trainer.recompute_activations": True},
}
