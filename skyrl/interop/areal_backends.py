"""AReaL's per-engine `backend`, such as `actor.backend: "megatron:d1p2t4"`, which replaces its `allocation_mode`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.interop.areal_allocation import Part, read_training
from skyrl.interop.areal_values import Becomes

_MODELS = {"actor": "policy", "ref": "ref", "critic": "critic", "teacher": "teacher"}


def engine_backend(values: Mapping[str, Any]) -> str:
    """`sglang` or `vllm`, by either spelling; empty where the file does not say."""
    text = str(values.get("allocation_mode") or values.get("rollout.backend") or "")
    return next((name for name in ("sglang", "vllm") if text.startswith(name)), "")


def per_node(values: Mapping[str, Any]) -> int:
    """GPUs of a node."""
    found = values.get("cluster.n_gpus_per_node", values.get("n_gpus_per_node", 8))
    return found if isinstance(found, int) and found > 0 else 8


def backend(key: str, value: Any, values: Mapping[str, Any]) -> Becomes:
    """The conversion of `actor.backend`, `rollout.backend` and their like."""
    owner = key.removesuffix(".backend")
    if values.get("allocation_mode"):
        return Becomes(needless="allocation_mode decides, here as there")
    part = read_training(str(value))
    if part is None:
        return Becomes(not_yet=f"this form of backend: {value}")
    if owner == "rollout":
        return Becomes(writes=engines(part))
    if owner == "ref" and value == values.get("actor.backend"):
        return Becomes(needless="the reference shares the policy's GPUs")
    if _MODELS.get(owner) not in ("policy", "ref", "critic"):
        return Becomes(not_yet="models beside policy, reference and critic")
    return learners(part, _MODELS[owner], per_node(values))


def engines(part: Part) -> dict[str, Any]:
    """Inference engines with GPUs of their own, as in AReaL."""
    table = "generator.inference_engine."
    return {
        "trainer.placement.colocate_all": False,
        table + "backend": "vllm",
        table + "num_engines": part.data,
        table + "tensor_parallel_size": part.tensor,
        table + "pipeline_parallel_size": part.pipeline,
    }


def learners(part: Part, model: str, gpus_per_node: int) -> Becomes:
    """The GPUs of one model, and how they share it."""
    writes = placed(part, model, gpus_per_node)
    note = "Archon is AReaL's sharding by FSDP2" if part.backend == "archon" else ""
    return Becomes(writes=writes | (sharding(part) if model == "policy" else {}), note=note)


def placed(part: Part, model: str, gpus_per_node: int) -> dict[str, Any]:
    """Nodes and GPUs of one model."""
    nodes, each = max(1, -(-part.gpus // gpus_per_node)), min(part.gpus, gpus_per_node)
    return {f"trainer.placement.{model}_num_nodes": nodes, f"trainer.placement.{model}_num_gpus_per_node": each}


def sharding(part: Part) -> dict[str, Any]:
    """The strategy, and the degrees of parallelism of the policy."""
    by_fsdp = part.tensor == 1 if part.backend == "" else part.backend != "megatron"
    if by_fsdp and part.pipeline == 1:
        sizes = {"sequence": part.context, **({"tensor": part.tensor} if part.tensor > 1 else {})}
        return {
            "trainer.strategy": "fsdp2",
            **{f"trainer.policy.{name}_parallel_size": size for name, size in sizes.items()},
        }
    megatron = "trainer.policy.megatron_config."
    degrees = {"tensor": part.tensor, "pipeline": part.pipeline}
    return {
        "trainer.strategy": "megatron",
        **{f"{megatron}{name}_model_parallel_size": size for name, size in degrees.items()},
        f"{megatron}context_parallel_size": part.context,
    }
