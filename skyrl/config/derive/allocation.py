"""`trainer.placement.allocation`: one string that sets several fields, in AReaL's grammar.

Fields that are not written are derived from the string, so that `skyrl config explain` names it as their origin. The
grammar is in `skyrl.planning.allocation`; converters use the functions here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skyrl.config.derive.sizes import GPUS_OF_A_MACHINE, Model
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import STRATEGIES, StrategyFacts
from skyrl.planning.allocation import Allocation, Part, read_allocation
from skyrl.tree import get_at
from skyrl.tree.rules import Rule, rule

PATH = "trainer.placement.allocation"
ROLES: Mapping[Model, tuple[str, ...]] = {
    "policy": ("policy", "actor"),
    "critic": ("critic", "policy", "actor"),
    "ref": ("ref", "policy", "actor"),
    "teacher": ("teacher", "policy", "actor"),
}
"""Model -> names of its part of the allocation; the first one present counts."""

_ENGINE = "generator.inference_engine."
_STRATEGIES = {"fsdp": "fsdp2", "archon": "fsdp2", "megatron": "megatron"}


def strategy_of(part: Part) -> StrategyFacts:
    """Facts about the strategy that stands for the backend of learners; those of FSDP for the name of an engine."""
    return STRATEGIES[_STRATEGIES.get(part.learner, "fsdp2")]


def allocation_of(run: SkyRLTrainConfig) -> Allocation | None:
    """The allocation that the run names; None if it names none."""
    text = run.trainer.placement.allocation
    return None if text is None else read_allocation(text)


def fields_of(
    allocation: Allocation, gpus_of_a_machine: int = GPUS_OF_A_MACHINE, models: tuple[Model, ...] = tuple(ROLES)
) -> dict[str, Any]:
    """Paths -> values that the allocation stands for, for the engines and for `models`."""
    fields: dict[str, Any] = {}
    if allocation.engines is not None:
        fields |= engine_fields(allocation.engines)
        if allocation.learners:
            fields["trainer.placement.colocate_all"] = allocation.shares
    groups = {}
    for model in models:
        part = allocation.learner(*ROLES[model])
        if part is not None:
            fields |= learner_fields(part, model, gpus_of_a_machine)
            groups[model] = next(number for number, group in enumerate(allocation.groups) if part in group)
    if len(set(groups.values())) > 1:
        fields["trainer.placement.colocate_policy_ref"] = False
    return fields


def stands_for(allocation: Allocation) -> dict[str, Any]:
    """Paths -> values of everything that a run's allocation says: `fields_of` it, and the kind of its engines. A
    converter chooses the kind itself.
    """
    kind = {} if allocation.engines is None else {_ENGINE + "backend": allocation.engines.backend}
    return kind | fields_of(allocation)


def engine_fields(part: Part) -> dict[str, Any]:
    """The fields of inference engines: one engine for each data-parallel replica."""
    degrees = part.degrees
    return {
        _ENGINE + "num_engines": degrees.data,
        _ENGINE + "tensor_parallel_size": degrees.tensor,
        _ENGINE + "pipeline_parallel_size": degrees.pipeline,
    }


def learner_fields(part: Part, model: Model, gpus_of_a_machine: int = GPUS_OF_A_MACHINE) -> dict[str, Any]:
    """The fields of a model that learns or scores: its GPUs, and how they share it."""
    gpus_per_node = min(part.gpus, gpus_of_a_machine)
    fields: dict[str, Any] = {
        f"trainer.placement.{model}_num_nodes": -(-part.gpus // gpus_per_node),
        f"trainer.placement.{model}_num_gpus_per_node": gpus_per_node,
    }
    if model == "policy":
        fields["trainer.strategy"] = _STRATEGIES[part.learner]
    degrees = part.degrees
    own, experts = strategy_of(part).degrees, part.experts or degrees
    sizes = {"tensor": degrees.tensor, "pipeline": degrees.pipeline, "expert": experts.expert}
    sizes["sequence" if "sequence" in own else "context"] = degrees.context
    if part.experts:
        sizes["expert_tensor"] = experts.tensor
    return fields | {f"trainer.{model}.{own[name]}": size for name, size in sizes.items() if name in own}


def contradictions(run: SkyRLTrainConfig) -> dict[str, tuple[Any, Any]]:
    """Paths -> the written value and the allocation's value, where they differ."""
    allocation = allocation_of(run)
    expected = {} if allocation is None else stands_for(allocation)
    pairs = {path: (get_at(run, path), value) for path, value in expected.items()}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _rule_for(path: str) -> Rule[SkyRLTrainConfig]:
    default = get_at(SkyRLTrainConfig(), path)

    def the_allocation_says_so(run: SkyRLTrainConfig) -> object:
        """Engines, GPUs and degrees of parallelism are those of `trainer.placement.allocation`, where there is one."""
        allocation = allocation_of(run)
        return default if allocation is None else stands_for(allocation).get(path, default)

    decorator: Callable[[Callable[[SkyRLTrainConfig], Any]], Rule[SkyRLTrainConfig]]
    decorator = rule(writes=path, reads=(PATH,), unset=default, placeholder=False)
    return decorator(the_allocation_says_so)


def _paths() -> tuple[str, ...]:
    """Every path that an allocation may stand for."""
    part = "[{name}]:(attn:d1|ffn:d1)"
    models = "+".join(f"{{kind}}[{model}]:d1" for model in ROLES)
    strings = [f"vllm[rollout]:d1+{models.format(kind=kind)}" for kind in ("fsdp", "megatron")]
    cut = "+".join(f"megatron{part.format(name=model)}" for model in ROLES if model != "critic")
    strings.append(f"vllm[rollout]:d1+{cut}")
    return tuple(dict.fromkeys(path for text in strings for path in stands_for(read_allocation(text))))


ALLOCATION_RULES: tuple[Rule[SkyRLTrainConfig], ...] = tuple(_rule_for(path) for path in _paths())
"""One rule for each field that an allocation may stand for."""
