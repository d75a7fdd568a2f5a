"""Converts AReaL's experiment files to our tables. Copies of other keys (`${gconfig.temperature}`) are left to
derivation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from attrs import evolve

from skyrl.config.derive.sizes import Model
from skyrl.interop import not_converted
from skyrl.interop.areal.backends import (
    AUTOTP,
    MODELS,
    allocation,
    autotp,
    backend,
    engine_backend,
    in_other_backend,
    router,
    strategy,
    whole_cluster,
)
from skyrl.interop.areal.defaults import (
    NO_REFERENCE,
    has_critic,
    has_reference,
    has_table,
    is_whole,
    left_out,
    other_defaults,
)
from skyrl.interop.areal.keys import (
    INTERVALS,
    KEPT,
    KEYS,
    LOSS_SCALING,
    OTHERS,
    ROLLOUT_KEYS,
    agent,
    checkpoints,
    data_source,
    device,
    for_sglang,
    kl,
    read_areal,
    warmup_share,
)
from skyrl.interop.areal.learner_keys import LEARNER_KEYS, ONE_LIMIT, loss_scaling, precision
from skyrl.interop.areal.machines import machines, tracker
from skyrl.interop.areal.objective import OBJECTIVE, estimator, is_weighted, teacher
from skyrl.interop.areal.programs import (
    read_experiment,
    read_launch,
    refuse_images,
    remarks_of,
    with_defaults_of_references,
)
from skyrl.interop.areal.same_settings import copies, follows, intervals, version_notice, why_unknown
from skyrl.interop.areal.supervised import convert_supervised, is_supervised
from skyrl.interop.areal.switches import SWITCHES
from skyrl.interop.report import Conversion
from skyrl.interop.systems import System, convert_settings
from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    Dependent,
    Translation,
    Values,
    dropout,
    number,
    redundant,
    refused,
    unsupported,
)
from skyrl.interop.values import is_script, without_references
from skyrl.interop.writing import Writing

_MINI_BATCHES = {
    "actor.ppo_n_minibatches": "trainer.policy_mini_batch_size",
    "ppo.ppo_n_minibatches": "trainer.policy_mini_batch_size",
    "critic.ppo_n_minibatches": "trainer.critic_mini_batch_size",
}
_ONE_PASS = "reuse_train_logp"
"""Way to get proximal log-probabilities for which AReaL trains on one mini-batch (areal/api/cli_args.py:1912)."""

_STALENESS = ("rollout.max_head_offpolicyness", "max_head_offpolicyness")
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
    "valid_dataset.max_length": "train_dataset.max_length",
}
"""Settings that must equal another one, because there is a single field for both here."""

_ORIGINALS = {"actor.dtype": "bfloat16", "actor.attn_impl": "flash_attention_2", "gconfig.temperature": 1.0}
"""AReaL's defaults of both versions."""

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


def convert_areal(name: str, *, keep_engine: bool = False, number: int | None = None) -> Conversion:
    """Convert a YAML file, or a script that starts a program with one; `number` chooses among several runs of it.
    Raises `ConfigError` if it cannot be read, and in the same cases as `convert_keys`.
    """
    if not is_script(name):
        return convert_keys(read_experiment(name), name, keep_engine=keep_engine)
    keys, launch = read_launch(name, number)
    conversion = convert_keys(keys, name, keep_engine=keep_engine)
    return launch.finished(evolve(conversion, remarks=(*remarks_of(launch), *conversion.remarks)))


def convert_keys(keys: Mapping[str, Any], where: str = "experiment", *, keep_engine: bool = False) -> Conversion:
    """Convert flat dotted keys and their values, as in a file. SGLang engines become vLLM engines unless `keep_engine`.
    Raises `ConfigError` for a kind of run that is not implemented, and if there is no engine to keep.
    """
    omitted = with_defaults_of_references(keys)
    values, originals = without_references({**keys, **omitted})
    values = {key: value for key, value in values.items() if key not in omitted}
    refuse_images(values, where)
    engine = engine_backend(values)
    if keep_engine and not engine:
        hint = 'set one (rollout.backend: "sglang:d4"), or omit --keep-engine'
        raise not_converted(where, "sets no engine to keep", hint)
    if is_supervised(values):
        return convert_supervised(values, originals, where)
    is_kept = keep_engine and engine == KEPT
    system = System(
        keys=LEARNER_KEYS | ROLLOUT_KEYS | KEYS,
        dependent=(for_sglang(_DEPENDENT) if is_kept else _DEPENDENT, _SAME),
        switches=SWITCHES,
        unknown=why_unknown,
        defaults=left_out,
        reports_defaults=True,
        implied=_implied,
        other_defaults=lambda settings, run: other_defaults(settings, run, OTHERS if is_kept else {}),
        read=read_areal,
    )
    writing = Writing(where)
    if engine:
        writing.write("engines", ENGINE + "backend", KEPT if is_kept else "vllm")
    conversion = convert_settings(system, values, writing, originals)
    remarks = [_IN_PYTHON] if "data" in conversion.tables else []
    remarks += [_STAY if is_kept else _REPLACED] if engine == KEPT else []
    return evolve(conversion, remarks=tuple(remarks), notice=version_notice(values, "GRPOConfig"))


def _implied(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Settings that an experiment implies without naming them: estimator, device, adapters, a teacher's weight."""
    if values.get("teacher.path") and "teacher.distill_loss_weight" not in values:
        yield "teacher", ALGORITHM + "distillation.coef", 0.005  # AReaL's default
    if is_whole(values):
        for name, value in estimator(values).items():
            yield "advantages", ALGORITHM + name, value
        for model in ("actor", "critic") if has_critic(values) else ("actor",):
            if values.get(f"{model}.use_lora") and f"{model}.lora_rank" not in values:
                yield f"{model}.use_lora", f"trainer.{MODELS[model]}.model.lora.rank", 32
            if (key := f"{model}.ppo_n_minibatches") not in values:  # AReaL's default of 4 does not divide the batch
                yield "one mini-batch", _MINI_BATCHES[key], _batch(values)
    if is_whole(values) or any(key.startswith("ppo.") for key in values):
        yield "device", "trainer.device", device(values)


def _unselected_engine(key: str, value: object, values: Values) -> Translation | None:
    engine, owner = engine_backend(values), key.partition(".")[0]
    return redundant(f"no effect: the engine is {engine}") if engine and owner != engine else None


def _use_adapter(key: str, value: object, values: Values) -> Translation:
    rank = f"trainer.{MODELS[key.partition('.')[0]]}.model.lora.rank"
    return redundant(f"set by {rank}") if value else redundant("off")


def _limit(key: str, value: object, values: Values) -> Translation | None:
    """Convert a limit that is one for all processes here: the largest that the file names for any of them."""
    name = key.rpartition(".")[2]
    if name not in ONE_LIMIT or key.startswith(("teacher.", "train_dataset.", "valid_")):
        return None
    numbers = [number(value) for key, value in values.items() if key.endswith(f".{name}") and value is not None]
    limits = [limit for limit in numbers if isinstance(limit, int | float)]
    if not limits:
        return redundant("not set")
    note = "the largest of several values in the file" if len({*limits}) > 1 else ""
    return Translation(writes={ONE_LIMIT[name]: max(limits)}, note=note)


def _staleness(key: str, value: object, values: Values) -> Translation | None:
    """Convert the staleness limit; in AReaL, training is asynchronous if samples may be stale."""
    if "async_training" in values:
        return None
    return Translation(
        writes={"trainer.fully_async.enabled": bool(value), "trainer.fully_async.max_staleness_steps": value}
    )


def _mini_batches(key: str, value: object, values: Values) -> Translation:
    """Convert AReaL's number of mini-batches per batch to our number of prompts per mini-batch."""
    batch = _batch(values)
    if values.get("actor.prox_logp_method") == _ONE_PASS and values.get("actor.use_decoupled_loss"):
        return Translation(writes={_MINI_BATCHES[key]: batch}, note=f"{_ONE_PASS} makes it one mini-batch")
    if not isinstance(batch, int) or not isinstance(value, int) or value < 1 or batch % value:
        return refused(f"{batch} prompts cannot be split evenly into {value} mini-batches")
    return Translation(writes={_MINI_BATCHES[key]: batch // value})


def _batch(values: Values) -> Any:
    """Number of prompts of a step, if the file sets it."""
    return next((values[name] for name in _BATCH if name in values), None)


def _convert_drop_last(key: str, drops: object, values: Values) -> Translation:
    """Convert `drop_last`. Asynchronous training takes prompts one by one and fills the batch from the next epoch."""
    if drops:
        return Translation(writes={"data.epoch_tail": "drop"})
    if values.get("async_training", bool(number(values.get(_STALENESS[0], 0)))):
        note = "asynchronous training carries prompts over to the next epoch"
        return Translation(writes={"data.epoch_tail": "carry"}, note=note)
    return Translation(writes={"data.epoch_tail": "short"})


def _dual_clip(key: str, value: object, values: Values) -> Translation | None:
    """Convert `c_clip`. In AReaL it acts whenever it is given; here it belongs to one loss, or to a switch of the
    decoupled loss.
    """
    if value is None:
        return None
    if values.get("actor.use_cispo_loss"):
        return redundant("AReaL's CISPO clips no loss")  # areal/trainer/ppo/actor.py:586
    if values.get("actor.use_sapo_loss") or values.get("actor.importance_sampling_level", "token") != "token":
        return unsupported("dual clipping with SAPO or with sequence-level ratios")
    writes: dict[str, Any] = {ALGORITHM + "clip_ratio_c": number(value)}
    if is_weighted(values):
        return Translation(writes=writes | {ALGORITHM + "decoupled.dual_clip": True})
    return Translation(writes=writes | {ALGORITHM + "policy_loss_type": "dual_clip"})


def _penalty(key: str, value: object, values: Values) -> Translation:
    if number(value) and is_whole(values) and not has_reference(values):
        return refused(NO_REFERENCE)
    return kl(value, values.get("actor.kl_estimator", "k1"))


def _masked_reward(key: str, value: object, values: Values) -> Translation | None:
    """Convert the zero reward of cut samples. AReaL zeroes the shaped reward, we the one that is then shaped."""
    if value and (number(values.get("actor.reward_bias", 0)) or has_table(values, "actor.reward_norm")):
        return unsupported("a zero in place of the shaped reward, with reward_bias or reward_norm")
    return None


def _source(key: str, value: object, values: Values) -> Translation | None:
    if not isinstance(value, str):
        return None
    split = values.get(f"{key.removesuffix('path')}split")
    return Translation(writes={_SOURCES[key]: [data_source(value, split)]})


def _allocation(key: str, value: object, values: Values) -> Translation:
    """Convert nodes, GPUs and degrees of parallelism together; `allocation_mode` or the backends contain them all."""
    if not value:
        return redundant("not set: the backends define the allocation")
    return allocation(str(value), values, _models(values))


def _nodes(key: str, value: object, values: Values) -> Translation:
    """Convert `n_nodes` and `n_gpus_per_node`: they describe the cluster and, without an allocation, the run, too."""
    if not isinstance(value, int) or value < 1:
        return redundant("no effect: not a positive number")
    if key == "cluster.n_nodes" and "n_nodes" in values:
        return redundant("size of the whole cluster; the run uses n_nodes of it")
    cluster = {"slurm.nodes" if key.endswith("n_nodes") else "slurm.gpus_per_node": value}
    is_allocated = values.get("allocation_mode") or any(name.endswith(".backend") for name in values)
    if is_allocated or not is_whole(values):
        return Translation(cluster=cluster)
    return evolve(whole_cluster(values, _models(values)), cluster=cluster)


def _models(values: Values) -> tuple[Model, ...]:
    """The models that the file trains or scores with."""
    has_penalty = any(number(values.get(name, 0)) for name in ("actor.kl_ctl", "ppo.kl_ctl"))
    models: tuple[Model, ...] = ("policy", "ref") if has_penalty else ("policy",)
    return (*models, "critic") if has_critic(values) else models


_DEPENDENT: dict[str, Dependent] = {
    "teacher.*": teacher,
    "sglang.*": _unselected_engine,
    "vllm.*": _unselected_engine,
    "*.backend": backend,
    **{f"{model}{AUTOTP}": autotp for model in MODELS},
    "actor.use_lora": _use_adapter,
    "critic.use_lora": _use_adapter,
    **{f"*{name}": _limit for name in ONE_LIMIT},
    **{f"{model}.*": in_other_backend for model in MODELS},
    "cluster.fileroot": partial(checkpoints, "trainer.ckpt_path"),
    "actor.disable_dropout": partial(dropout, "trainer.policy.use_dropout", "actor.path"),
    "critic.disable_dropout": partial(dropout, "trainer.critic.use_dropout", "critic.path"),
    "actor.mask_no_eos_with_zero": _masked_reward,
    "actor.dtype": precision,
    **{f"*.{name}": loss_scaling for name in LOSS_SCALING},
    "*.scheduling_strategy.*": strategy,
    "*.archon.moe_router_dtype": router,
    "*.warmup_steps_proportion": warmup_share,
    "rollout.agent.*": agent,
    "allocation_mode": _allocation,
    **dict.fromkeys(("cluster.n_nodes", "cluster.n_gpus_per_node", "n_nodes", "n_gpus_per_node"), _nodes),
    **dict.fromkeys(_MINI_BATCHES, _mini_batches),
    "actor.c_clip": _dual_clip,
    "ppo.c_clip": _dual_clip,
    "actor.kl_ctl": _penalty,
    **dict.fromkeys(_STALENESS, _staleness),
    **dict.fromkeys(_SOURCES, _source),
    "train_dataset.drop_last": _convert_drop_last,
    **OBJECTIVE,
    "*": lambda key, value, values: machines(key, value, values) or tracker(key, value, values, "trainer."),
}
"""Settings whose meaning depends on others."""

_SAME = intervals(INTERVALS) | copies(_COPIES, _ORIGINALS) | {"tokenizer_path": follows("actor.path")}
"""Settings that are one with others here."""
