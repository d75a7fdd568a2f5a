"""Converts AReaL's experiments without generation: `SFTConfig` to `kind = "sft"`, `RWConfig` to
`kind = "reward_model"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl.config import RewardModelConfig, SFTConfig
from skyrl.config.derive.allocation import strategy_of
from skyrl.interop.areal.backends import AUTOTP, autotp, by_deepspeed, read_by
from skyrl.interop.areal.learner_keys import ONE_LIMIT, loss_scaling
from skyrl.interop.areal.machines import machines
from skyrl.interop.areal.settings import Tables, convert_setting
from skyrl.interop.areal.supervised_keys import COPIES, INTERVALS, KEYS, of_one_model
from skyrl.interop.areal.trackers import tracker
from skyrl.interop.conversions import Becomes, source_of
from skyrl.interop.report import Conversion
from skyrl.interop.writing import Writing, apply
from skyrl.planning.allocation import AllocationError, read_part

_TABLES = Tables(keys=KEYS, copies=COPIES, follows={"tokenizer_path": "model.path"}, intervals=INTERVALS)
_OF_RL = ("actor.", "actor_train.", "ppo.", "gconfig.", "rollout.")
_SAMPLING = ("ppo.", "gconfig.")
_TYPE = "train_dataset.type"
_SPLITS = {"train_dataset.path": ("train_datasets", "train"), "valid_dataset.path": ("eval_datasets", "test")}
_LORA = ("model.peft_type", "model.target_modules", "model.lora_rank", "model.lora_alpha")
_EVALUATION = ("evaluator.freq_", "evaluator.eval_before_train")
_MACHINES = ("cluster.n_nodes", "cluster.n_gpus_per_node")


def is_supervised(values: Mapping[str, Any]) -> bool:
    """Whether the file configures a single model and no sampling."""
    if any(key.startswith(_SAMPLING) for key in values):
        return False
    if any(key.startswith(_OF_RL) for key in values):
        return values.get(_TYPE) in ("sft", "rw")  # since 2026 these files name their model `actor`, too
    return values.get(_TYPE) in ("sft", "rw") or any(key.startswith("model.") for key in values)


def is_preference(values: Mapping[str, Any]) -> bool:
    """Whether the file trains on preferences without a reward model: DPO and similar methods."""
    return values.get(_TYPE) == "dpo" or "actor.beta" in values or "actor.loss_type" in values


def convert_supervised(values: Mapping[str, Any], copies: Mapping[str, str], where: str) -> Conversion:
    """Convert settings whose references are resolved; `copies` maps each copied key to its original."""
    if not any(key.startswith("actor.") for key in values):
        return _converted(values, copies, where)
    found = _converted({_of_model(key): value for key, value in values.items()}, copies, where)
    names = {_of_model(key): key for key in values}
    return evolve(found, lines=tuple(evolve(line, source=names[line.source]) for line in found.lines))


def _of_model(key: str) -> str:
    return "model." + key.removeprefix("actor.") if key.startswith("actor.") else key


def _converted(values: Mapping[str, Any], copies: Mapping[str, str], where: str) -> Conversion:
    is_reward = values.get(_TYPE) == "rw" or (values.get(_TYPE) != "sft" and values.get("model.is_critic") is True)
    writing = Writing(where, RewardModelConfig if is_reward else SFTConfig)
    for key, value in values.items():
        if key == "allocation_mode" or (key == "model.backend" and "allocation_mode" not in values):
            apply(writing, key, value, _allocation(str(value), values))
        elif key in _MACHINES:
            apply(writing, key, value, _nodes(key, value, values))
        elif key in _SPLITS and value is not None:
            apply(writing, key, value, _source(key, str(value), values))
        elif key in (_TYPE, "valid_dataset.type"):
            apply(writing, key, value, _rows("rw" if is_reward else "sft", value))
        elif key == "model.is_critic":
            apply(writing, key, value, _critic(is_reward, value))
        elif key.startswith(_EVALUATION) and values.get("valid_dataset.path") is None:
            apply(writing, key, value, Becomes(needless="no effect: there is no valid_dataset"))
        elif (become := loss_scaling(key, value, values) or _of_every_kind(key, value, values)) is not None:
            apply(writing, key, value, become)
        else:
            convert_setting(writing, _TABLES, key, value, values, copies.get(key, ""))
    if values.get("model.use_lora") and "model.lora_rank" not in values:
        writing.write("model.use_lora", "model.lora.rank", 32)
    writing.write("device", "device", "cuda")
    return writing.finish()


def _allocation(text: str, values: Mapping[str, Any]) -> Becomes:
    """Convert an allocation such as `fsdp:d4t2`: each GPU is a rank; ranks shard the weights by the degrees above 1."""
    try:
        part = read_part(text)
    except AllocationError as error:
        return Becomes(not_yet=f"unsupported allocation_mode: {error}")
    if part.is_engine or not part.gpus:
        return Becomes(refused=f"{part.backend} is not a training backend, but this kind of run only trains")
    if strategy_of(part).own_modules:
        return Becomes(not_yet=f"supervised runs with Megatron; FSDP2 can use all {part.gpus} GPUs: see placement")
    per_node = values.get("cluster.n_gpus_per_node", 8)
    per_node = per_node if isinstance(per_node, int) and per_node > 0 else 8
    nodes, each = max(1, -(-part.gpus // per_node)), min(part.gpus, per_node)
    writes = {"placement.num_nodes": nodes, "placement.num_gpus_per_node": each, "strategy": "fsdp2"}
    degrees = {"sequence": part.degrees.context, "tensor": part.degrees.tensor, "expert": part.degrees.expert}
    sizes = {f"{name}_parallel_size": size for name, size in degrees.items() if size > 1}
    return Becomes(writes=by_deepspeed(writes | sizes, values))


def _backend(values: Mapping[str, Any]) -> object:
    """The string that defines how GPUs share the model."""
    return values.get("allocation_mode") or values.get("model.backend")


def _nodes(key: str, value: object, values: Mapping[str, Any]) -> Becomes:
    """Convert nodes and GPUs, which describe the cluster and, without an allocation, the run as well."""
    if not isinstance(value, int) or value < 1:
        return Becomes(needless="no effect: not a positive number")
    name = "nodes" if key.endswith("n_nodes") else "gpus_per_node"
    is_allocated = any(values.get(each) for each in ("allocation_mode", "model.backend"))
    writes = {} if is_allocated else {f"placement.num_{name}": value}
    return Becomes(writes=writes, cluster={f"slurm.{name}": value})


def _of_every_kind(key: str, value: object, values: Mapping[str, Any]) -> Becomes | None:
    """Convert settings of machines and trackers, which have the same meaning in every kind of run."""
    if ".scheduling_strategy." in key:
        return Becomes(needless="the run has only one model, with its own GPUs")
    if why := read_by(f"actor.{key.removeprefix('model.')}", {"actor.backend": values.get("model.backend")}):
        return Becomes(needless=why)
    if key == f"model{AUTOTP}":
        return of_one_model(autotp("actor", value, {"actor.backend": _backend(values)}))
    if key in _LORA and not values.get("model.use_lora"):
        return Becomes(needless="use_lora is off")
    if key == "model.use_lora":
        return Becomes(needless="set by model.lora.rank") if value else Becomes(needless="off")
    if (name := key.rpartition(".")[2]) in ONE_LIMIT and key.startswith("model."):
        return Becomes(writes={ONE_LIMIT[name].removeprefix("trainer."): value})
    is_of_rewards = key.startswith("scheduler.") and key != "scheduler.type"
    return (None if is_of_rewards else machines(key, value, values)) or tracker(key, value, values, "")


def _source(key: str, name: str, values: Mapping[str, Any]) -> Becomes:
    """Convert a data source: a file, or a hub dataset, of which AReaL's scripts train on the split `train` and evaluate
    on `test` unless the file names another.
    """
    path, usual = _SPLITS[key]
    rows = "the columns of its rows: see docs/sft.md"
    named = values.get(f"{key.removesuffix('path')}split")
    source = source_of(name, named or usual)
    is_theirs = source != name and not named
    return Becomes(
        writes={path: [source]},
        note=f"AReaL's scripts use this split, and also choose {rows}" if is_theirs else f"check {rows}",
    )


def _rows(wanted: str, value: object) -> Becomes:
    if value == wanted:
        return Becomes(needless="set by kind")
    return Becomes(refused=f"this kind of run needs rows of type {wanted!r}")


def _critic(is_reward: bool, value: object) -> Becomes:
    if value is is_reward:
        return Becomes(needless="set by kind")
    return Becomes(
        refused="a reward model needs a value head" if is_reward else "rows of type 'sft' train no value head"
    )
