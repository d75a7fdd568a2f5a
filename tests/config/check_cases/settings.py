"""Paths and groups of settings that the cases of several checks are written with."""

from __future__ import annotations

from typing import Any

from skyrl.config import SkyRLTrainConfig, load
from skyrl.config.loading.resolve import resolve_with_origins
from tests.config.leaves import RUNNABLE

ENGINE = "generator.inference_engine."
PLACEMENT = "trainer.placement."
RAY: dict[str, Any] = {PLACEMENT + "executor": "ray"}
VLLM: dict[str, Any] = {**RAY, ENGINE + "backend": "vllm"}
SERVER: dict[str, Any] = {ENGINE + "backend": "http", ENGINE + "external_server_urls": ["http://10.0.0.1:8000"]}
MEGATRON: dict[str, Any] = {**VLLM, "trainer.strategy": "megatron"}
APART: dict[str, Any] = {**RAY, PLACEMENT + "colocate_all": False, PLACEMENT + "colocate_policy_ref": False}
LORA: dict[str, Any] = {"trainer.policy.model.lora.rank": 8}
TURNS = {"generator.max_turns": 2, "generator.max_input_length": 2000}
NO_KL: dict[str, Any] = {"trainer.algorithm.use_kl_loss": False}
CRITIC: dict[str, Any] = {"trainer.critic.model.path": "critic"}


def gpus(number: int, *models: str) -> dict[str, Any]:
    """So many GPUs on one node for each of the models."""
    return {f"{PLACEMENT}{model}_num_gpus_per_node": number for model in models}


def split(tensor: int, pipeline: int, context: int) -> dict[str, Any]:
    """How Megatron splits the policy."""
    sizes = {"tensor_model": tensor, "pipeline_model": pipeline, "context": context}
    return {f"trainer.policy.megatron_config.{name}_parallel_size": size for name, size in sizes.items()}


def resolved(values: dict[str, Any]) -> SkyRLTrainConfig:
    """A tree that runs but for these values."""
    loaded = load([], RUNNABLE | values)
    return resolve_with_origins(loaded.config, loaded.origins)[0]
