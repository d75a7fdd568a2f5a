"""Converts AReaL's `allocation_mode`, and the per-engine `backend` that replaces it:
`actor.backend: "megatron:d1p2t4"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.config.derive.allocation import ROLES, engine_fields, fields_of, learner_fields, strategy_of
from skyrl.config.derive.sizes import Model
from skyrl.config.settings.strategies import STRATEGIES
from skyrl.interop.conversions import Becomes, number
from skyrl.planning.allocation import LEARNERS, AllocationError, Part, read_allocation, read_part

SHARED = "shares the policy's GPUs"
AUTOTP = ".ds_auto_tp.autotp_size"
"""Setting of a model: the number of ranks over which DeepSpeed's layers split its matrices."""

_STRATEGY = "trainer.strategy"
_MODELS: Mapping[str, Model] = {"actor": "policy", "ref": "ref", "critic": "critic"}


def engine_backend(values: Mapping[str, Any]) -> str:
    """The file's engine, `sglang` or `vllm`, from either way to set it; empty if the file does not set it."""
    text = str(values.get("allocation_mode") or values.get("rollout.backend") or "")
    return next((name for name in ("sglang", "vllm") if text.startswith(name)), "")


def read_by(key: str, values: Mapping[str, Any]) -> str:
    """Why a setting of a backend has no effect: the file selects another backend. Empty if that is not the case."""
    owner, _, rest = key.partition(".")
    table = rest.partition(".")[0]
    if owner not in _MODELS or table not in LEARNERS:
        return ""
    named = learner_of(owner, values)
    return f"no effect: the backend is {named}" if named and named != table else ""


def learner_of(owner: str, values: Mapping[str, Any]) -> str:
    """The backend of a learner: fsdp, megatron or archon; empty if the file does not set it."""
    part = _part_of(owner, values)
    return part.learner if part else ""


def trains_in_halves(owner: str, values: Mapping[str, Any]) -> bool:
    """Whether a learner can train in float16, as far as its backend decides."""
    part = _part_of(owner, values)
    return part is None or not strategy_of(part).own_modules


def _part_of(owner: str, values: Mapping[str, Any]) -> Part | None:
    try:
        if text := values.get("allocation_mode"):
            return read_allocation(str(text)).learner(*ROLES[_MODELS[owner]])
        text = values.get(f"{owner}.backend")
        return read_part(str(text)) if text else None
    except AllocationError:
        return None


def autotp(owner: str, size: object, values: Mapping[str, Any]) -> Becomes:
    """Convert `ds_auto_tp.autotp_size`: DeepSpeed splits the matrices of all models with AutoTP's layers."""
    if size in (None, 1):
        return Becomes(needless="no effect at this value")
    part = _part_of(owner, values)
    if part is not None and strategy_of(part).own_modules:
        return Becomes(needless="no effect: the backend is megatron, whose degree t sets the tensor-parallel size")
    if part is not None and part.degrees.tensor not in (1, size):
        return Becomes(refused=f"contradicts the backend, whose tensor-parallel size is {part.degrees.tensor}")
    return Becomes(writes={f"trainer.{_MODELS[owner]}.tensor_parallel_size": size, _STRATEGY: "deepspeed"})


def by_deepspeed(fields: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with DeepSpeed in place of FSDP2 if the file splits a model with DeepSpeed's AutoTP."""
    sizes = {key: value for key, value in values.items() if key.endswith(AUTOTP)}
    is_cut = any(size not in (None, 1) for size in sizes.values())
    strategies = {path: value for path, value in fields.items() if path.endswith("strategy")}
    changes = {path: "deepspeed" for path, value in strategies.items() if not STRATEGIES[value].own_modules}
    return {**fields, **(changes if is_cut else {})}


def per_node(values: Mapping[str, Any]) -> int:
    """Number of GPUs per node."""
    found = values.get("cluster.n_gpus_per_node", values.get("n_gpus_per_node", 8))
    return found if isinstance(found, int) and found > 0 else 8


def backend(key: str, value: object, values: Mapping[str, Any]) -> Becomes:
    """Convert `actor.backend`, `rollout.backend` and similar settings."""
    owner = key.removesuffix(".backend")
    if values.get("allocation_mode"):
        return Becomes(needless="allocation_mode takes precedence, as in AReaL")
    if value in (None, ""):
        return Becomes(needless="not set")
    try:
        part = read_part(str(value))
    except AllocationError as error:
        return Becomes(not_yet=f"unsupported backend: {error}")
    if part.is_engine is not (owner == "rollout"):
        kinds = ("a training backend", "an inference engine")
        why = f"{part.learner} is {kinds[part.is_engine]}, but {owner} needs {kinds[owner == 'rollout']}"
        return Becomes(refused=why)
    if owner == "rollout":
        return Becomes(writes=engines(part, shares=_is_colocated("rollout", values)))
    return _learner(owner, part, values)


def _learner(owner: str, part: Part, values: Mapping[str, Any]) -> Becomes:
    """Convert the backend of a model that learns or scores."""
    if owner == "ref" and not number(values.get("actor.kl_ctl", 0.1)):
        return Becomes(needless="no effect: without a KL penalty there is no reference model, as in AReaL")
    model = _MODELS.get(owner)
    if model is None:
        return Becomes(not_yet="models other than policy, reference and critic")
    fields = by_deepspeed(_without_ones(learner_fields(part, model, per_node(values))), values)
    if owner != "actor" and not _is_colocated(owner, values):
        fields["trainer.placement.colocate_policy_ref"] = False
    note = "Archon is AReaL's FSDP2 backend" if part.backend == "archon" else ""
    return Becomes(writes=fields, note=note)


def strategy(key: str, value: object, values: Mapping[str, Any]) -> Becomes:
    """Convert `scheduling_strategy`: whether a role shares the GPUs of another one."""
    owner, _, name = key.partition(".scheduling_strategy.")
    if name == "fork":
        return Becomes(needless="every rank runs in its own process")
    if name == "target":
        if not _is_colocated(owner, values):
            return Becomes(needless="only used with type = colocation")
        return Becomes(needless=SHARED) if value in _MODELS else Becomes(not_yet=f"sharing GPUs with {value}")
    if name != "type" or value not in ("separation", "colocation"):
        return Becomes(refused="expected type = separation or type = colocation")
    others = [each for each in ("ref", "critic") if each != owner and f"{each}.path" in values]
    if owner in ("ref", "critic") and any(_is_colocated(each, values) != (value == "colocation") for each in others):
        return Becomes(not_yet="only one of reference and critic on the policy's GPUs")
    return Becomes(needless=SHARED if value == "colocation" else "has separate GPUs, whose number its backend sets")


def _is_colocated(owner: str, values: Mapping[str, Any]) -> bool:
    """Whether the role shares the policy's GPUs; by default in AReaL it does not."""
    return bool(values.get(f"{owner}.scheduling_strategy.type", "separation") == "colocation")


def whole_cluster(values: Mapping[str, Any], models: tuple[Model, ...]) -> Becomes:
    """Convert nodes and GPUs of a file with neither an allocation nor backends: models and engines share all GPUs."""
    nodes = next((values[name] for name in ("cluster.n_nodes", "n_nodes") if name in values), 1)
    writes: dict[str, Any] = {"generator.inference_engine.num_engines": nodes * per_node(values)}
    for model in models:
        writes |= {
            f"trainer.placement.{model}_num_nodes": nodes,
            f"trainer.placement.{model}_num_gpus_per_node": per_node(values),
        }
    return Becomes(writes=writes, note="no allocation is given: models and engines share all GPUs")


def engines(part: Part, *, shares: bool = False) -> dict[str, Any]:
    """Fields of inference engines on separate GPUs, or, if `shares`, on the policy's."""
    return {"trainer.placement.colocate_all": shares, **engine_fields(part)}


def allocation(text: str, values: Mapping[str, Any], models: tuple[Model, ...]) -> Becomes:
    """Convert `allocation_mode` for engines and the given models."""
    try:
        found = read_allocation(text)
    except AllocationError as error:
        return Becomes(not_yet=f"unsupported allocation_mode: {error}")
    if found.kind != "training":
        return Becomes(not_yet=f"an allocation for {found.kind}; a run needs both engines and learners")
    missing = [model for model in models if found.learner(*ROLES[model]) is None]
    if missing:
        return Becomes(not_yet=f"an allocation without a part for {' and '.join(missing)}")
    fields = by_deepspeed(_without_ones(fields_of(found, per_node(values), models)), values)
    return Becomes(writes=fields)


def _without_ones(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without learners' degrees of parallelism that are 1, the default."""
    ones = {path for path, value in fields.items() if path.endswith("parallel_size") and value == 1}
    return {path: value for path, value in fields.items() if path not in ones or path.startswith("generator.")}
