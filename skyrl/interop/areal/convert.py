"""Converts AReaL's experiment files to our tables. Copies of other keys (`${gconfig.temperature}`) are left to
derivation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl.config.derive.sizes import Model
from skyrl.config.loading.kinds import KINDS
from skyrl.errors import ConfigError, Problem
from skyrl.interop.areal.backends import (
    AUTOTP,
    allocation,
    autotp,
    backend,
    engine_backend,
    read_by,
    strategy,
    whole_cluster,
)
from skyrl.interop.areal.defaults import NO_REFERENCE, has_reference, is_whole, left_out, other_defaults
from skyrl.interop.areal.keys import INTERVALS, KEYS
from skyrl.interop.areal.keys_2026 import KEYS_2026, LORA_KEYS
from skyrl.interop.areal.learner_keys import (
    LEARNER_KEYS,
    MODELS,
    NO_ADAPTER,
    ONE_LIMIT,
    loss_scaling,
    precision,
)
from skyrl.interop.areal.machines import LINES_OF_BASH, machines, without_own_folder
from skyrl.interop.areal.objective import OBJECTIVE_KEYS, estimator, has_critic, objective
from skyrl.interop.areal.rollout_keys import ROLLOUT_KEYS
from skyrl.interop.areal.settings import Tables, convert_setting
from skyrl.interop.areal.sglang import KEPT, OTHERS, in_one_stage, of_sglang
from skyrl.interop.areal.supervised import convert_supervised, is_preference, is_supervised
from skyrl.interop.areal.trackers import tracker
from skyrl.interop.conversions import ALGORITHM, ENGINE, Becomes, kl, number, source_of
from skyrl.interop.environment import Read, read_environment
from skyrl.interop.report import Conversion
from skyrl.interop.values import flat_file, without_references
from skyrl.interop.writing import Writing, apply

_TOGETHER = ("allocation_mode", "cluster.n_nodes", "cluster.n_gpus_per_node", "n_nodes", "n_gpus_per_node")
_MINI_BATCHES = {
    "actor.ppo_n_minibatches": "trainer.policy_mini_batch_size",
    "ppo.ppo_n_minibatches": "trainer.policy_mini_batch_size",
    "critic.ppo_n_minibatches": "trainer.critic_mini_batch_size",
}
_STALENESS = ("rollout.max_head_offpolicyness", "max_head_offpolicyness")
_PENALTY = ("actor.overlong_tokens", "actor.overlong_penalty_factor")
_DUAL_CLIP = ("actor.c_clip", "ppo.c_clip")
_COPIES = {
    "actor.group_size": "gconfig.n_samples",
    "actor.adv_norm.group_size": "gconfig.n_samples",
    "actor.reward_norm.group_size": "gconfig.n_samples",
    "actor.max_new_tokens": "gconfig.max_new_tokens",
    "rollout.consumer_batch_size": "train_dataset.batch_size",
    "ref.dtype": "actor.dtype",
    "ref.bf16": "actor.bf16",
    "ref.attn_impl": "actor.attn_impl",
    "ref.temperature": "gconfig.temperature",
    "critic.dtype": "actor.dtype",
    "critic.attn_impl": "actor.attn_impl",
    "critic.gradient_checkpointing": "actor.gradient_checkpointing",
    "rollout.agent.engine_max_tokens": "gconfig.max_tokens",
    "sglang.model_path": "actor.path",
    "sglang.random_seed": "seed",
}
"""Settings that must equal another one, because there is a single field for both here."""

_ORIGINALS = {"actor.dtype": "bfloat16", "actor.attn_impl": "flash_attention_2", "gconfig.temperature": 1.0}
"""AReaL's defaults of both versions."""

_TABLES = Tables(
    keys=LEARNER_KEYS | ROLLOUT_KEYS | KEYS_2026 | KEYS,
    copies=_COPIES,
    originals=_ORIGINALS,
    follows={"tokenizer_path": "actor.path"},
    intervals=INTERVALS,
)

_DATA = "data"
_IN_PYTHON = (
    "AReaL chooses the reward function and the dataset splits in its training script, not in this file: set "
    "environment.env_class to the reward function (rewards.py:my_reward), and append the split to each data source "
    "(NAME:SPLIT)."
)

_REPLACED = (
    "SGLang engines were converted to vLLM. --keep-engine keeps SGLang with its options (docs/servers.md), but it has "
    "not been tested on a GPU yet."
)
_STAY = "The engines remain SGLang (docs/servers.md), which has not been tested on a GPU yet."

_SOURCES = {"train_dataset.path": "data.train_data", "valid_dataset.path": "data.val_data"}
_BATCH = ("train_dataset.batch_size", "dataset.train_bs_n_seqs")


def convert_areal(name: str, *, keep_engine: bool = False) -> Conversion:
    """Convert a YAML file. Raises `ConfigError` if it cannot be read, and in the same cases as `convert_keys`."""
    return convert_keys(flat_file(name, of="areal"), name, keep_engine=keep_engine)


def convert_keys(keys: Mapping[str, Any], where: str = "experiment", *, keep_engine: bool = False) -> Conversion:
    """Convert flat dotted keys and their values, as in a file. SGLang engines become vLLM engines unless `keep_engine`.
    Raises `ConfigError` for a kind of run that is not implemented, and if there is no engine to keep.
    """
    values, copies = without_references(keys)
    named = engine_backend(values)
    if keep_engine and not named:
        hint = 'set one (rollout.backend: "sglang:d4"), or omit --keep-engine'
        raise ConfigError([Problem(path=where, message="sets no engine to keep", hint=hint)], "Nothing was converted")
    if is_preference(values):
        hint = "supported kinds of run: " + ", ".join(KINDS)
        message = "is a DPO experiment: preference training without a reward model is not implemented yet"
        raise ConfigError([Problem(path=where, message=message, hint=hint)], title="Nothing was converted")
    if is_supervised(values):
        return convert_supervised(values, copies, where)
    writing, silent = Writing(where), left_out(values)
    whole = {**values, **silent}
    is_kept = keep_engine and named == KEPT
    if named:
        writing.write("engines", ENGINE + "backend", KEPT if is_kept else "vllm")
    for key, value in whole.items():
        _convert(writing, key, value, whole, copies.get(key, ""), is_kept=is_kept)
    _complete(writing, whole)
    converted = writing.finish(lambda run: tuple(other_defaults(values, run, OTHERS if is_kept else {})))
    lines = tuple(line for line in converted.lines if line.source not in silent or line.is_refused)
    defaults = tuple(line for line in converted.lines if line.source in silent and line.targets)
    remarks = [_IN_PYTHON] if _DATA in converted.tables else []
    remarks += [_STAY if is_kept else _REPLACED] if named == KEPT else []
    return evolve(converted, lines=lines, defaults=defaults, remarks=tuple(remarks))


def _convert(
    writing: Writing, key: str, value: object, values: Mapping[str, Any], copy_of: str, *, is_kept: bool
) -> None:
    is_followed = _copies_a_table(value, values) or key.endswith(LINES_OF_BASH)
    read = Read(value) if is_followed else read_environment(without_own_folder(key, value), key)
    together = (of_sglang(key, read.value) if is_kept else None) or _of_several(key, read.value, values)
    together = in_one_stage(together) if is_kept and together else together
    if read.refused:
        apply(writing, key, value, Becomes(refused=read.refused))
    elif together is not None:
        apply(writing, key, value, together)
    else:
        convert_setting(writing, _TABLES, key, read.value, values, copy_of)


def _copies_a_table(value: object, values: Mapping[str, Any]) -> bool:
    """Whether the value refers to a table or a list of tables: `${actor.scheduling_spec}`."""
    name = value[2:-1] if isinstance(value, str) and value.startswith("${") and value.endswith("}") else ""
    return bool(name) and any(key.startswith((f"{name}.", f"{name}[")) for key in values)


def _of_several(key: str, value: object, values: Mapping[str, Any]) -> Becomes | None:
    """The conversion of a setting that depends on others; None for one that does not."""
    engine, owner = engine_backend(values), key.partition(".")[0]
    if owner in ("sglang", "vllm") and engine and owner != engine:
        return Becomes(needless=f"no effect: the engine is {engine}")
    if key.endswith(".backend") and key.count(".") == 1:
        return backend(key, value, values)
    if key.endswith(AUTOTP) and owner in MODELS:
        return autotp(owner, value, values)
    if key in LORA_KEYS and owner == "ref":
        return Becomes(needless=NO_ADAPTER)
    if key in LORA_KEYS and not values.get(f"{owner}.use_lora"):
        return Becomes(needless=f"{owner}.use_lora is off")
    if key in ("actor.use_lora", "critic.use_lora"):
        ours = f"trainer.{MODELS[owner]}.model.lora.rank"
        return Becomes(needless=f"set by {ours}") if value else Becomes(needless="off")
    if (name := key.rpartition(".")[2]) in ONE_LIMIT and not key.startswith(("teacher.", "train_dataset.", "valid_")):
        return _limit(name, values)
    if why := read_by(key, values):
        return Becomes(needless=why)
    if key == "actor.dtype":
        return precision(value, values)
    if scaling := loss_scaling(key, value, values):
        return scaling
    if ".scheduling_strategy." in key:
        return strategy(key, value, values)
    if key in _TOGETHER:
        return _machines(key, value, values)
    if key in _MINI_BATCHES:
        return _mini_batches(value, values, _MINI_BATCHES[key])
    if key in _PENALTY and not values.get("actor.overlong_reward_penalty"):
        return Becomes(needless="actor.overlong_reward_penalty is off")
    if key in _DUAL_CLIP and value is not None:
        return _dual_clip(value, values)
    if key == "actor.kl_ctl":
        if number(value) and is_whole(values) and not has_reference(values):
            return Becomes(refused=NO_REFERENCE)
        return kl(value, values.get("actor.kl_estimator", "k1"))
    if key in _STALENESS and "async_training" not in values:
        return _staleness(value)
    if key in _SOURCES and isinstance(value, str):
        split = values.get(f"{key.removesuffix('path')}split")
        return Becomes(writes={_SOURCES[key]: [source_of(value, split)]})
    if key == "train_dataset.drop_last":
        return _last_batch(value, values)
    if key in OBJECTIVE_KEYS:
        return objective(key, value, values)
    return machines(key, value, values) or tracker(key, value, values, "trainer.")


def _complete(writing: Writing, values: Mapping[str, Any]) -> None:
    """Write settings that an experiment implies without naming them: estimator, device, size of adapters."""
    if not is_whole(values):
        if any(key.startswith("ppo.") for key in values):
            writing.write("device", "trainer.device", "cuda")
        return
    for name, value in estimator(values).items():
        writing.write("advantages", ALGORITHM + name, value)
    for model in ("actor", "critic") if has_critic(values) else ("actor",):
        if values.get(f"{model}.use_lora") and f"{model}.lora_rank" not in values:
            writing.write(f"{model}.use_lora", f"trainer.{MODELS[model]}.model.lora.rank", 32)
        if (key := f"{model}.ppo_n_minibatches") not in values:  # AReaL's default of 4 does not divide the batch
            writing.write("one mini-batch", _MINI_BATCHES[key], _batch(values))
    writing.write("device", "trainer.device", "cuda")


def _limit(name: str, values: Mapping[str, Any]) -> Becomes:
    """Convert a limit that is one for all processes here: the largest that the file names for any of them."""
    given = [number(each) for key, each in values.items() if key.endswith(f".{name}") and each is not None]
    numbers = [each for each in given if isinstance(each, int | float)]
    if not numbers:
        return Becomes(needless="not set")
    note = "the largest of several values in the file" if len({*numbers}) > 1 else ""
    return Becomes(writes={ONE_LIMIT[name]: max(numbers)}, note=note)


def _staleness(value: object) -> Becomes:
    """Convert the staleness limit; in AReaL, training is asynchronous if samples may be stale."""
    writes = {"trainer.fully_async.enabled": bool(value), "trainer.fully_async.max_staleness_steps": value}
    return Becomes(writes=writes)


def _mini_batches(count: object, values: Mapping[str, Any], path: str) -> Becomes:
    """Convert AReaL's number of mini-batches per batch to our number of prompts per mini-batch."""
    batch = _batch(values)
    if not isinstance(batch, int) or not isinstance(count, int) or count < 1 or batch % count:
        return Becomes(refused=f"{batch} prompts cannot be split evenly into {count} mini-batches")
    return Becomes(writes={path: batch // count})


def _batch(values: Mapping[str, Any]) -> Any:
    """Number of prompts of a step, if the file sets it."""
    return next((values[name] for name in _BATCH if name in values), None)


def _last_batch(drops: object, values: Mapping[str, Any]) -> Becomes:
    """Convert `drop_last`. Asynchronous training takes prompts one by one and fills the batch from the next epoch."""
    if drops:
        return Becomes(writes={"data.epoch_tail": "drop"})
    is_asynchronous = values.get("async_training", bool(number(values.get(_STALENESS[0], 0))))
    if is_asynchronous:
        return Becomes(
            writes={"data.epoch_tail": "carry"}, note="asynchronous training carries prompts over to the next epoch"
        )
    return Becomes(writes={"data.epoch_tail": "short"})


def _dual_clip(value: object, values: Mapping[str, Any]) -> Becomes:
    """Convert `c_clip`. In AReaL it acts whenever it is given; here it belongs to one loss, or to a switch of the
    decoupled loss.
    """
    is_decoupled = values.get("actor.use_decoupled_loss") or values.get("ppo.use_decoupled_loss")
    if values.get("actor.use_sapo_loss") or values.get("actor.importance_sampling_level", "token") != "token":
        return Becomes(not_yet="dual clipping with SAPO or with sequence-level ratios")
    switch = {"decoupled.dual_clip": True} if is_decoupled else {"policy_loss_type": "dual_clip"}
    writes = {"clip_ratio_c": number(value), **switch}
    return Becomes(writes={ALGORITHM + name: each for name, each in writes.items()})


def _machines(key: str, value: object, values: Mapping[str, Any]) -> Becomes:
    """Convert nodes, GPUs and degrees of parallelism together; `allocation_mode` or the backends contain them all."""
    if key != "allocation_mode":
        return _nodes(key, value, values)
    if not value:
        return Becomes(needless="not set: the backends define the allocation")
    return allocation(str(value), values, _models(values))


def _nodes(key: str, value: object, values: Mapping[str, Any]) -> Becomes:
    """Convert `n_nodes` and `n_gpus_per_node`: they describe the cluster and, without an allocation, the run, too."""
    if not isinstance(value, int) or value < 1:
        return Becomes(needless="no effect: not a positive number")
    if key == "cluster.n_nodes" and "n_nodes" in values:
        return Becomes(needless="size of the whole cluster; the run uses n_nodes of it")
    cluster = {"slurm.nodes" if key.endswith("n_nodes") else "slurm.gpus_per_node": value}
    is_allocated = values.get("allocation_mode") or any(each.endswith(".backend") for each in values)
    if is_allocated or not is_whole(values):
        return Becomes(cluster=cluster)
    return evolve(whole_cluster(values, _models(values)), cluster=cluster)


def _models(values: Mapping[str, Any]) -> tuple[Model, ...]:
    """The models that the file trains or scores with."""
    has_penalty = any(number(values.get(name, 0)) for name in ("actor.kl_ctl", "ppo.kl_ctl"))
    models: tuple[Model, ...] = ("policy", "ref") if has_penalty else ("policy",)
    return (*models, "critic") if has_critic(values) else models
