"""AReaL's `allocation_mode`, and the per-engine `backend` that replaces it: `actor.backend: "megatron:d1p2t4"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.config.allocation import ROLES, engine_fields, fields_of, learner_fields
from skyrl.config.sizes import Model
from skyrl.interop.areal_values import Becomes
from skyrl.planning.allocation import AllocationError, Part, read_allocation, read_part

_MODELS: Mapping[str, Model] = {"actor": "policy", "ref": "ref", "critic": "critic"}


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
    try:
        part = read_part(str(value))
    except AllocationError as error:
        return Becomes(not_yet=f"this form of backend: {error}")
    if owner == "rollout":
        return Becomes(writes=engines(part))
    if owner == "ref" and value == values.get("actor.backend"):
        return Becomes(needless="the reference shares the policy's GPUs")
    model = _MODELS.get(owner)
    if model is None:
        return Becomes(not_yet="models beside policy, reference and critic")
    note = "Archon is AReaL's sharding by FSDP2" if part.backend == "archon" else ""
    return Becomes(writes=_without_ones(learner_fields(part, model, per_node(values))), note=note)


def engines(part: Part) -> dict[str, Any]:
    """Inference engines with GPUs of their own, as in AReaL."""
    own = {"trainer.placement.colocate_all": False, "generator.inference_engine.backend": "vllm"}
    return own | engine_fields(part)


def allocation(text: str, values: Mapping[str, Any], models: tuple[Model, ...]) -> Becomes:
    """The conversion of `allocation_mode`, of engines and these models."""
    try:
        found = read_allocation(text)
    except AllocationError as error:
        return Becomes(not_yet=f"this form of allocation_mode: {error}")
    if found.kind != "training":
        return Becomes(not_yet=f"an allocation for {found.kind}: a run of skyrl needs engines and learners")
    missing = [model for model in models if found.learner(*ROLES[model]) is None]
    if missing:
        return Becomes(not_yet=f"an allocation without a part for {' and '.join(missing)}")
    fields = _without_ones(fields_of(found, per_node(values), models))
    return Becomes(writes={"generator.inference_engine.backend": "vllm", **fields})


def _without_ones(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without degrees of parallelism of learners that are 1, which is their default."""
    ones = {path for path, value in fields.items() if path.endswith("parallel_size") and value == 1}
    return {path: value for path, value in fields.items() if path not in ones or path.startswith("generator.")}
