"""Converts AReaL's `allocation_mode`, and the per-engine `backend` that replaces it:
`actor.backend: "megatron:d1p2t4"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.config.derive.allocation import ROLES, engine_fields, fields_of, learner_fields, strategy_of
from skyrl.config.derive.sizes import Model
from skyrl.config.settings.strategies import STRATEGIES
from skyrl.interop.translation import Translation, Values, number, redundant, refused, unsupported
from skyrl.planning.allocation import LEARNERS, AllocationError, Part, read_allocation, read_part
from skyrl.tree.types import display_value

SHARED = "shares the policy's GPUs"
AUTOTP = ".ds_auto_tp.autotp_size"
"""Setting of a model: the number of ranks over which DeepSpeed's layers split its matrices."""

_EXPERT_TENSOR, _TENSOR = ".expert_tensor_parallel_size", ".tensor_model_parallel_size"
MODELS: Mapping[str, Model] = {"actor": "policy", "ref": "ref", "critic": "critic"}
"""AReaL's name of a model -> ours."""


def engine_backend(values: Values) -> str:
    """The file's engine, `sglang` or `vllm`, from either way to set it; empty if the file does not set it."""
    text = str(values.get("allocation_mode") or values.get("rollout.backend") or "")
    return next((name for name in ("sglang", "vllm") if text.startswith(name)), "")


def in_other_backend(key: str, value: object, values: Values) -> Translation | None:
    """The outcome of a setting of a backend that the file does not select; None for any other setting."""
    owner, _, rest = key.partition(".")
    table = rest.partition(".")[0]
    if owner not in MODELS or table not in LEARNERS:
        return None
    part = _part_of(owner, values)
    selected = part.learner if part else ""
    return redundant(f"no effect: the backend is {selected}") if selected and selected != table else None


def trains_in_halves(values: Values) -> bool:
    """Whether the learners can train in float16, as far as the policy's backend decides."""
    part = _part_of("actor", values)
    return part is None or not strategy_of(part).own_modules


def _part_of(owner: str, values: Values) -> Part | None:
    try:
        if text := values.get("allocation_mode"):
            return read_allocation(str(text)).learner(*ROLES[MODELS[owner]])
        text = values.get(f"{owner}.backend")
        return read_part(str(text)) if text else None
    except AllocationError:
        return None


def router(key: str, dtype: object, values: Values) -> Translation:
    """Convert Archon's `moe_router_dtype`. A model has routers only if it has experts, which the degrees tell."""
    part = _part_of(key.partition(".")[0], values)
    degrees = part and (part.experts or part.degrees)
    if dtype and degrees and degrees.expert > 1:
        return unsupported("routers of experts in float32 (trainer.strategy = megatron has them)")
    return redundant("acts only on experts, whose routers have the dtype of the model here")


def autotp(key: str, size: object, values: Values) -> Translation:
    """Convert `ds_auto_tp.autotp_size`: DeepSpeed splits the matrices of all models with AutoTP's layers."""
    owner = key.partition(".")[0]
    if size in (None, 1):
        return redundant("no effect at this value")
    part = _part_of(owner, values)
    if part is not None and strategy_of(part).own_modules:
        return redundant("no effect: the backend is megatron, whose degree t sets the tensor-parallel size")
    if part is not None and part.degrees.tensor not in (1, size):
        return refused(f"contradicts the backend, whose tensor-parallel size is {part.degrees.tensor}")
    return Translation(writes={f"trainer.{MODELS[owner]}.tensor_parallel_size": size, "trainer.strategy": "deepspeed"})


def by_deepspeed(fields: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """The fields, with DeepSpeed in place of FSDP2 if the file splits a model with DeepSpeed's AutoTP."""
    sizes = {key: value for key, value in values.items() if key.endswith(AUTOTP)}
    is_cut = any(size not in (None, 1) for size in sizes.values())
    strategies = {path: value for path, value in fields.items() if path.endswith("strategy")}
    changes = {path: "deepspeed" for path, value in strategies.items() if not STRATEGIES[value].own_modules}
    return {**fields, **(changes if is_cut else {})}


def per_node(values: Values) -> int:
    """Number of GPUs per node."""
    gpus = values.get("cluster.n_gpus_per_node", values.get("n_gpus_per_node", 8))
    return gpus if isinstance(gpus, int) and gpus > 0 else 8


def backend(key: str, value: object, values: Values) -> Translation | None:
    """Convert `actor.backend`, `rollout.backend` and similar settings; None for one inside of another table."""
    owner = key.removesuffix(".backend")
    if "." in owner:
        return None
    if values.get("allocation_mode"):
        return redundant("allocation_mode takes precedence, as in AReaL")
    if value in (None, ""):
        return redundant("not set")
    try:
        part = read_part(str(value))
    except AllocationError as error:
        return unsupported(f"unsupported backend: {error}")
    if part.is_engine is not (owner == "rollout"):
        kinds = ("a training backend", "an inference engine")
        return refused(f"{part.learner} is {kinds[part.is_engine]}, but {owner} needs {kinds[owner == 'rollout']}")
    if owner == "rollout":
        colocated = {"trainer.placement.colocate_all": _is_colocated("rollout", values)}
        return Translation(writes=colocated | engine_fields(part))
    if owner == "ref" and not number(values.get("actor.kl_ctl", 0.1)):
        return redundant("no effect: without a KL penalty there is no reference model, as in AReaL")
    model = MODELS.get(owner)
    if model is None:
        return unsupported("models other than policy, reference and critic")
    if reason := _missing_pipeline(part):
        return unsupported(reason)
    fields = by_deepspeed(_drop_default_degrees(learner_fields(part, model, per_node(values))), values)
    if owner != "actor" and not _is_colocated(owner, values):
        fields["trainer.placement.colocate_policy_ref"] = False
    note = "Archon is AReaL's FSDP2 backend" if part.backend == "archon" else ""
    return Translation(writes=fields, note=note)


def _missing_pipeline(part: Part) -> str:
    """The missing capability of a backend with pipeline stages; empty for one without, or with them here."""
    return "pipeline stages with FSDP2" if part.degrees.pipeline > 1 and not strategy_of(part).own_modules else ""


def strategy(key: str, value: object, values: Values) -> Translation:
    """Convert `scheduling_strategy`: whether a role shares the GPUs of another one."""
    owner, _, name = key.partition(".scheduling_strategy.")
    if name == "fork":
        return redundant("every rank runs in its own process")
    if name == "target":
        if not _is_colocated(owner, values):
            return redundant("only used with type = colocation")
        return redundant(SHARED) if value in MODELS else unsupported(f"sharing GPUs with {display_value(value)}")
    if name != "type" or value not in ("separation", "colocation"):
        return refused("expected type = separation or type = colocation")
    others = [other for other in ("ref", "critic") if other != owner and f"{other}.path" in values]
    if owner in ("ref", "critic") and any(_is_colocated(other, values) != (value == "colocation") for other in others):
        return unsupported("only one of reference and critic on the policy's GPUs")
    return redundant(SHARED if value == "colocation" else "has separate GPUs, whose number its backend sets")


def _is_colocated(owner: str, values: Values) -> bool:
    """Whether the role shares the policy's GPUs; by default in AReaL it does not."""
    return bool(values.get(f"{owner}.scheduling_strategy.type", "separation") == "colocation")


def whole_cluster(values: Values, models: tuple[Model, ...]) -> Translation:
    """Convert nodes and GPUs of a file with neither an allocation nor backends: models and engines share all GPUs."""
    nodes = next((values[name] for name in ("cluster.n_nodes", "n_nodes") if name in values), 1)
    writes: dict[str, Any] = {"generator.inference_engine.num_engines": nodes * per_node(values)}
    for model in models:
        writes |= {
            f"trainer.placement.{model}_num_nodes": nodes,
            f"trainer.placement.{model}_num_gpus_per_node": per_node(values),
        }
    return Translation(writes=writes, note="no allocation is given: models and engines share all GPUs")


def allocation(text: str, values: Values, models: tuple[Model, ...]) -> Translation:
    """Convert `allocation_mode` for engines and the given models."""
    try:
        parts = read_allocation(text)
    except AllocationError as error:
        return unsupported(f"unsupported allocation_mode: {error}")
    if parts.kind != "training":
        return unsupported(f"an allocation for {parts.kind}; a run needs both engines and learners")
    missing = [model for model in models if parts.learner(*ROLES[model]) is None]
    if missing:
        return unsupported(f"an allocation without a part for {' and '.join(missing)}")
    if reason := next(filter(None, map(_missing_pipeline, parts.learners)), ""):
        return unsupported(reason)
    fields = _drop_default_degrees(fields_of(parts, per_node(values), models))
    return Translation(writes=by_deepspeed(fields, values))


def _drop_default_degrees(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without learners' degrees of parallelism that are 1, the default. The tensor degree of experts is
    that of the rest by default here, and 1 in AReaL.
    """
    tensors = [path for path, value in fields.items() if path.endswith(_TENSOR) and value != 1]
    fields = {path.replace(_TENSOR, _EXPERT_TENSOR): 1 for path in tensors} | dict(fields)
    ones = {path for path, value in fields.items() if path.endswith("parallel_size") and value == 1}
    ones -= {path for path in ones if fields.get(path.replace(_EXPERT_TENSOR, _TENSOR), 1) != 1}
    return {path: value for path, value in fields.items() if path not in ones or path.startswith("generator.")}
