"""Converts AReaL's experiments without generation: `SFTConfig` to `kind = "sft"`, `RWConfig` to
`kind = "reward_model"`, `DPOConfig` to `kind = "preference"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from attrs import evolve

from skyrl.config import PreferenceConfig, RewardModelConfig, SFTConfig
from skyrl.config.derive.allocation import strategy_of
from skyrl.interop.areal.backends import AUTOTP, autotp, by_deepspeed, in_other_backend, per_node, router
from skyrl.interop.areal.keys import (
    LOSS_SCALING,
    ROLLOUT_KEYS,
    checkpoints,
    data_source,
    device,
    optimizer_keys,
    read_areal,
    recovery,
    switch,
    warmup_share,
)
from skyrl.interop.areal.learner_keys import LEARNER_KEYS, ONE_LIMIT, computed_in, loss_scaling
from skyrl.interop.areal.machines import machines, tracker
from skyrl.interop.areal.same_settings import copies, follows, intervals, version_notice, why_unknown
from skyrl.interop.areal.switches import SUPERVISED_SWITCHES
from skyrl.interop.report import Conversion
from skyrl.interop.systems import System, convert_settings
from skyrl.interop.translation import (
    Dependent,
    Entry,
    Translation,
    Values,
    dropout,
    entry_of_one_model,
    fixed,
    idle,
    independent,
    maps_to,
    missing,
    non_empty,
    of_one_model,
    redundant,
    refused,
    unsupported,
)
from skyrl.interop.writing import Writing
from skyrl.planning.allocation import LEARNERS, AllocationError, read_part

_TYPE = "train_dataset.type"
_SPLITS = {"train_dataset.path": ("train_datasets", "train"), "valid_dataset.path": ("eval_datasets", "test")}
_OF_EVERY_KIND = (
    "*.", "post_exit_hook", "*_dataset.", "perf_tracer", "memory_profiler", "enable_offload", "saver.", "recover.",
)  # fmt: skip
_NO_MEGATRON = "supervised runs with Megatron"

_ROOTS = {
    "sft": (SFTConfig, "SFTConfig"),
    "rw": (RewardModelConfig, "RWConfig"),
    "dpo": (PreferenceConfig, "DPOConfig"),
}
"""Type of rows -> the class of our tree, and of AReaL's."""


def is_supervised(values: Values) -> bool:
    """Whether the file configures a single model, beside its reference, and no sampling."""
    if is_preference(values):
        return True
    if any(key.startswith(("ppo.", "gconfig.")) for key in values):
        return False
    if any(key.startswith(("actor.", "actor_train.", "rollout.")) for key in values):
        return values.get(_TYPE) in ("sft", "rw")  # since 2026 these files name their model `actor`, too
    return values.get(_TYPE) in ("sft", "rw") or any(key.startswith("model.") for key in values)


def is_preference(values: Values) -> bool:
    """Whether the file trains on preferences without a reward model: DPO and similar methods."""
    return values.get(_TYPE) == "dpo" or "actor.beta" in values or "actor.loss_type" in values


def convert_supervised(settings: Values, originals: Mapping[str, str], where: str) -> Conversion:
    """Convert settings whose references are resolved; `originals` maps each copied key to its original."""
    has_actor = any(key.startswith("actor.") for key in settings)
    prefers = is_preference(settings)
    names = {"model." + key.removeprefix("actor.") if key.startswith("actor.") else key: key for key in settings}
    values = {key: settings[name] for key, name in names.items()}
    is_reward = values.get(_TYPE) == "rw" or (values.get(_TYPE) != "sft" and values.get("model.is_critic") is True)
    rows = "dpo" if prefers else "rw" if is_reward else "sft"
    root, areal_class = _ROOTS[rows]
    system = System(
        keys=KEYS | (_OF_PAIRS if prefers else {}),
        dependent=(_DEPENDENT | _kind(rows) | ({"ref.*": _convert_reference} if prefers else {}), _SAME),
        switches=SUPERVISED_SWITCHES,
        unknown=why_unknown,
        implied=_implied,
        read=read_areal,
    )
    writing = Writing(where, root)
    notice = version_notice(settings, areal_class)
    conversion = evolve(convert_settings(system, values, writing, originals), notice=notice)
    if not has_actor:
        return conversion
    return evolve(conversion, lines=tuple(evolve(line, source=names[line.source]) for line in conversion.lines))


def _implied(values: Values) -> Iterator[tuple[str, str, Any]]:
    if values.get("model.use_lora") and "model.lora_rank" not in values:
        yield "model.use_lora", "model.lora.rank", 32
    yield "device", "device", device(values)


def _allocation(key: str, value: object, values: Values) -> Translation | None:
    """Convert an allocation such as `fsdp:d4t2`: each GPU is a rank; ranks shard the weights by the degrees above 1."""
    if key == "model.backend" and values.get("allocation_mode"):
        return None
    if not value:
        return redundant("not set: model.backend defines the allocation")
    try:
        part = read_part(str(value))
    except AllocationError as error:
        return unsupported(f"unsupported allocation_mode: {error}")
    if part.is_engine or not part.gpus:
        return refused(f"{part.backend} is not a training backend, but this kind of run only trains")
    if strategy_of(part).own_modules:
        return unsupported(f"{_NO_MEGATRON}; FSDP2 can use all {part.gpus} GPUs: see placement")
    gpus = per_node(values)
    writes = {
        "placement.num_nodes": max(1, -(-part.gpus // gpus)),
        "placement.num_gpus_per_node": min(part.gpus, gpus),
        "strategy": "fsdp2",
    }
    degrees = {"sequence": part.degrees.context, "tensor": part.degrees.tensor, "expert": part.degrees.expert}
    sizes = {f"{name}_parallel_size": size for name, size in degrees.items() if size > 1}
    return Translation(writes=by_deepspeed(writes | sizes, values))


def _nodes(key: str, value: object, values: Values) -> Translation:
    """Convert nodes and GPUs, which describe the cluster and, without an allocation, the run as well."""
    if not isinstance(value, int) or value < 1:
        return redundant("no effect: not a positive number")
    name = "nodes" if key.endswith("n_nodes") else "gpus_per_node"
    is_allocated = values.get("allocation_mode") or values.get("model.backend")
    writes = {} if is_allocated else {f"placement.num_{name}": value}
    return Translation(writes=writes, cluster={f"slurm.{name}": value})


def _unselected_backend(key: str, value: object, values: Values) -> Translation | None:
    return in_other_backend(
        f"actor.{key.removeprefix('model.')}", value, {"actor.backend": values.get("model.backend")}
    )


def _autotp(key: str, value: object, values: Values) -> Translation:
    named = values.get("allocation_mode") or values.get("model.backend")
    return of_one_model(autotp("actor.", value, {"actor.backend": named}))


def _limit(key: str, value: object, values: Values) -> Translation:
    return Translation(writes={ONE_LIMIT[key.removeprefix("model.")].removeprefix("trainer."): value})


def _others(key: str, value: object, values: Values) -> Translation | None:
    """Convert settings of machines and trackers, which have the same meaning in every kind of run."""
    if key.startswith("scheduler.") and key != "scheduler.type":
        return None  # of rewards
    return machines(key, value, values) or tracker(key, value, values, "")


def _source(key: str, value: object, values: Values) -> Translation | None:
    """Convert a data source: a file, or a hub dataset, of which AReaL's scripts train on the split `train` and evaluate
    on `test` unless the file names another.
    """
    if value is None:
        return None
    path, usual = _SPLITS[key]
    page = "docs/preferences.md" if values.get(_TYPE) == "dpo" else "docs/sft.md"
    rows = f"the columns of its rows: see {page}"
    named = values.get(f"{key.removesuffix('path')}split")
    source = data_source(str(value), named or usual)
    has_their_split = source != str(value) and not named
    return Translation(
        writes={path: [source]},
        note=f"AReaL's scripts use this split, and also choose {rows}" if has_their_split else f"check {rows}",
    )


def _kind(rows: str) -> dict[str, Dependent]:
    """Entries of the settings that decide the kind of run, which its file says once."""
    is_reward = rows == "rw"
    head = "a reward model needs a value head" if is_reward else f"rows of type {rows!r} train no value head"

    def has_type(key: str, value: object, values: Values) -> Translation:
        if value in (None, rows):
            return redundant("set by kind")
        return refused(f"this kind of run needs rows of type {rows!r}")

    return {
        _TYPE: has_type,
        "valid_dataset.type": has_type,
        "model.is_critic": lambda key, value, values: redundant("set by kind") if value is is_reward else refused(head),
    }


def _convert_reference(key: str, value: object, values: Values) -> Translation:
    """Convert a setting of the reference, which here is the model that training starts from, on the policy's ranks,
    unless it has a path of its own.
    """
    if key == "ref.path":
        if value in (None, "", values.get("model.path")):
            return redundant("the model that training starts from")
        return Translation(writes={"ref_model_path": value})
    if key == "ref.dtype" and value != values.get("model.dtype", value):
        return unsupported("a reference in another type than the policy")
    return redundant("the reference is on the policy's ranks, and computes as it does")


_OF_PAIRS: dict[str, Entry] = {
    **dict.fromkeys(("beta", "model.beta"), "beta"),
    **dict.fromkeys(("loss_type", "model.loss_type"), maps_to("loss_type", convert=lambda name: [name])),
}
"""Settings of DPO, which AReaL's example has at its root, and its classes in those of the model."""

_DEPENDENT: dict[str, Dependent] = {
    "allocation_mode": _allocation,
    "model.backend": _allocation,
    "cluster.n_nodes": _nodes,
    "cluster.n_gpus_per_node": _nodes,
    **dict.fromkeys(_SPLITS, _source),
    "cluster.fileroot": partial(checkpoints, "ckpt_path"),
    "model.disable_dropout": partial(dropout, "use_dropout", "model.path"),
    **dict.fromkeys(
        ("evaluator.freq_*", "evaluator.eval_before_train"),
        idle(lambda values: values.get("valid_dataset.path") is None, "no effect: there is no valid_dataset"),
    ),
    **{f"*.{name}": loss_scaling for name in LOSS_SCALING},
    "*.warmup_steps_proportion": warmup_share,
    "*.scheduling_strategy.*": independent(redundant("the run has only one model, with its own GPUs")),
    **{f"model.{backend}*": _unselected_backend for backend in LEARNERS},
    "model.megatron*": lambda key, value, values: _unselected_backend(key, value, values) or unsupported(_NO_MEGATRON),
    f"model{AUTOTP}": _autotp,
    "model.archon.moe_router_dtype": lambda key, value, values: router(
        "actor", value, {"actor.backend": values.get("model.backend")}
    ),
    "model.use_lora": independent(lambda is_on: redundant("set by model.lora.rank" if is_on else "off")),
    **{f"model.{name}": _limit for name in ONE_LIMIT},
    "*": _others,
}
"""Settings whose meaning depends on others."""

_SAME = (
    intervals({"saver.freq_": "hf_save_interval", "recover.freq_": "ckpt_interval", "evaluator.freq_": "eval_interval"})
    | copies({"valid_dataset.max_length": "train_dataset.max_length"}, {})
    | {"tokenizer_path": follows("model.path")}
)
"""Settings that are one with others here."""

KEYS: dict[str, Entry] = {
    "experiment_name": "project_name",
    "trial_name": "run_name",
    "*.experiment_name": redundant("names are set once: project_name and run_name"),
    "*.trial_name": redundant("names are set once: project_name and run_name"),
    "*.fileroot": redundant("folders are set once: run_path, ckpt_path and export_path"),
    "seed": "seed",
    "total_train_epochs": "num_epochs",
    "total_train_steps": "num_steps",
    "total_train_n_seqs": "max_training_samples",
    "tokenizer_path": non_empty("tokenizer_path"),
    # the model
    "model.path": "model.path",
    "model.init_from_scratch": switch("model.init_from_scratch", off="pretrained weights are loaded"),
    "model.dtype": lambda value: computed_in(value, "bf16", ["fsdp_config."]),
    "model.gradient_checkpointing": "gradient_checkpointing",
    "model.attn_impl": "attention",
    "model.backend": redundant("allocation_mode takes precedence, as in AReaL"),
    "model.mb_spec.max_tokens_per_mb": "max_tokens_per_microbatch",
    "model.mb_spec.n_mbs": fixed(
        1, None, does="it does not affect results", otherwise="a minimum number of micro-batches"
    ),
    "model.mb_spec.granularity": redundant("both rows of a pair always stay together"),
    "model.pad_to_maximum": fixed(True, False, does="padding does not affect results", otherwise="other padding"),
    "model.grad_reduce_dtype": "fsdp_config.mixed_precision.reduce_dtype",
    "model.ds_auto_tp": missing("a value for a whole table; set its fields instead"),
    "model.optimizer": refused("training needs an optimizer"),
    **optimizer_keys("model.optimizer.", "optimizer_config.", "fsdp_config.cpu_offload"),
    # rows
    "train_dataset.path": "train_datasets",
    "valid_dataset.path": "eval_datasets",
    "train_dataset.batch_size": "batch_size",
    "valid_dataset.batch_size": redundant("it does not affect evaluation results"),
    "train_dataset.max_length": "max_length",
    "valid_dataset.max_length": missing("a separate maximum length for evaluation; max_length applies to all rows"),
    "train_dataset.shuffle": maps_to("sampler", convert=lambda on: "random" if on else "sequential"),
    "valid_dataset.shuffle": redundant("evaluation uses every row, so order does not matter"),
    "train_dataset.drop_last": lambda drops: (
        redundant("incomplete batches are dropped by default") if drops else Translation(writes={"epoch_tail": "short"})
    ),
    "valid_dataset.drop_last": fixed(False, does="evaluation uses every row", otherwise="dropping rows"),
    "*_dataset.pin_memory": redundant("rows are small, so pinned memory does not apply"),
    "*_dataset.reward_fn": redundant("supervised runs use no rewards"),
    "model.init_critic_from_actor": redundant("AReaL never reads it"),
    "valid_dataset": missing("a value for a whole table; set its fields instead"),
    # keeping and watching
    "evaluator.eval_before_train": "eval_before_train",
    "recover.mode": partial(recovery, "recover_mode"),
    "recover.retries": "recover_retries",
    "stats_logger.trackio.*": missing("the Trackio tracker", "disabled"),
    # machines
    "cluster.cluster_name": redundant("only a label"),
    "launcher.*": missing("launcher settings beyond those in docs/launching.md"),
    "scheduler.*": redundant("supervised runs use no rewards"),
    **dict.fromkeys(
        ("sglang.*", "vllm.*", "rollout.*", "model.temperature"), redundant("supervised runs generate nothing")
    ),
    **{
        key.replace("actor.", "model.", 1): entry_of_one_model(entry)
        for key, entry in (LEARNER_KEYS | ROLLOUT_KEYS).items()
        if key.startswith(("actor.", *_OF_EVERY_KIND)) and not key.startswith("actor.rejection_sampling")
    },
}
