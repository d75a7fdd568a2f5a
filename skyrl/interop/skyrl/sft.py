"""Converts settings of SkyRL's `main_sft`, which are not under `trainer`, to a run of `kind = "sft"`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve

from skyrl.config import SFTConfig
from skyrl.config.loading.newer_upstream_fields import NEWER_UPSTREAM_FIELDS
from skyrl.errors import ConfigError
from skyrl.interop.report import Conversion, Line
from skyrl.interop.skyrl.defaults import other_defaults, tree_of, version_notice
from skyrl.interop.skyrl.settings import POLICY, convert_one, profiler, switches
from skyrl.interop.systems import System
from skyrl.interop.translation import Entry, Translation, fixed, redundant, refused, unsupported
from skyrl.interop.values import read_environment
from skyrl.interop.writing import Writing, apply
from skyrl.tree.arguments import split_path
from skyrl.tree.migrations import follow
from skyrl.tree.origins import Assignment, Origin, dotted

_STRATEGY = "strategy"
_BOUND = "max_tokens_per_microbatch"

_ONE_NAME = {"dataset_name": "dataset_split", "eval_dataset_name": "eval_dataset_split"}
_NAMES = {"train_datasets": "train_dataset_splits", "eval_datasets": "eval_dataset_splits"}
_PATHS = {"dataset_name": "train_datasets", "eval_dataset_name": "eval_datasets"}
_SPLITS = {split: name for name, split in (_ONE_NAME | _NAMES).items()}
"""Setting with splits -> the setting that names their datasets; here a source is `name:split`."""

_SAMPLER = ("sampler_class_path", "sampler_kwargs")


def _unless_empty(path: str, reason: str) -> Entry:
    return lambda value: Translation(writes={path: value}) if value else redundant(reason)


_KEYS: dict[str, Entry] = {
    "sequence_parallel_size": "sequence_parallel_size",
    "use_torch_compile": "use_torch_compile",
    "record_memory": "record_memory",
    # files of tokenized rows are sources like any other here
    "pretokenized_dataset_paths": _unless_empty("train_datasets", "no rows are tokenized already"),
    "eval_pretokenized_dataset_paths": _unless_empty("eval_datasets", "no rows are tokenized already"),
    "logger": "logger",
    "tags": "trackers.tags",
    "ckpt_path": _unless_empty("ckpt_path", "empty, so the default applies"),
    "export_path": _unless_empty("export_path", "empty, so the default applies"),
    "resume_from": lambda value: Translation(writes={"resume_from": value or ""}),
    "enable_ray_gpu_monitor": redundant("GPUs are not monitored through Ray"),
    **dict.fromkeys(
        ("num_workers", "async_batch_collation", "dataloader_num_workers", "dataloader_persistent_workers"),
        redundant("affects how fast batches are assembled, not their content"),
    ),
    **dict.fromkeys(
        ("cache_dir", "force_recache", "disable_cache"),
        redundant("rows are tokenized when the run starts; tokenized_path stores them"),
    ),
    "remove_microbatch_padding": "use_sequence_packing",
    "use_sample_packing": "use_sequence_packing",
    "megatron_config.async_dist_ckpt_save": redundant("checkpoints are written in the background"),
    "megatron_config.moe_enable_routing_replay": fixed(
        False, does="no engine has chosen experts for the rows", otherwise="replay of experts in supervised runs"
    ),
    _BOUND: _BOUND,
    "num_epochs": "num_epochs",
    "max_training_steps": "num_steps",
}
"""Settings that have a different name or meaning here."""

SFT_ROOTS = (
    *_KEYS, *_SAMPLER, *_ONE_NAME, *_NAMES, *_SPLITS, "strategy", "model", "model_config_kwargs", "optimizer_config",
    "placement", "megatron_config", "fsdp_config", "torch_profiler_config", "train_dataset_weights", "messages_key",
    "tools_key", "system_key", "eval_dataset_names", "eval_interval", "eval_before_train", "max_length", "num_steps",
    "batch_size", "micro_train_batch_size_per_gpu", "project_name", "run_name", "ckpt_interval", "max_ckpts_to_keep",
    "hf_save_interval", "seed", "sampler", "train_on_what", "dummy_run_full_ctx", "dummy_run_max_steps",
    "use_sequence_packing",
)  # fmt: skip
"""Top-level names of SkyRL's SFT configuration."""

_DUMMY_STEPS = 5
"""SkyRL's default of `dummy_run_max_steps`."""

_LEARNING = ("optimizer_config.lr", "model.path")
"""Settings whose default is SkyRL's in the converted run, since it changes what is learned."""

_SOURCES = ("train_datasets", "dataset_name", "pretokenized_dataset_paths")
_DATASET, _SPLIT = "yahma/alpaca-cleaned", "train[:100]"
"""SkyRL's default of `train_datasets` and of its split (train/config/sft_config.py:338)."""

_OF_RL = ("trainer", "generator", "environment", "data", "hydra")


def is_sft(keys: Iterable[str]) -> bool:
    """Whether the settings are those of `main_sft`: they have its top-level names, and none of an RL configuration."""
    tops = {key.partition(".")[0] for key in keys}
    return bool(tops & {*SFT_ROOTS}) and not tops & {*_OF_RL}


def convert_settings(settings: Sequence[tuple[str, Any] | Line], where: str) -> Conversion:
    """Convert settings in order, where the last value of a key wins; `Line` items were already refused."""
    writing = Writing(where, SFTConfig)
    pairs = [setting for setting in settings if not isinstance(setting, Line)]
    known = {key: read_environment(value, key).value for key, value in pairs}
    for item in settings:
        if isinstance(item, Line):
            writing.note(item)
            continue
        key, value = item
        read = read_environment(value, key)
        if read.refused:
            writing.note(Line(outcome="refused", source=key, value=value, reason=read.refused))
        else:
            _convert(writing, key, read.value, known | {key: read.value})
    if "device" not in known:
        writing.write("device", "device", "cuda")
    written = [Line(outcome="kept", source=key, value=value, targets=(key,)) for key, value in _left_out(known).items()]
    for line in written:
        writing.write(line.source, line.source, line.value)
    converted = writing.finish(lambda run: tuple(other_defaults(writing, "sft", known, _convert)))
    return evolve(converted, defaults=tuple(written), notice=version_notice("sft", known))


def _left_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a file omits and that change what is learned, or that others of its settings need, with SkyRL's
    defaults.
    """
    tree = tree_of("sft", values).defaults
    defaults = {key: tree[key] for key in _LEARNING if key not in values}
    if _STRATEGY not in values and any(key.startswith("megatron_config.") for key in values):
        defaults[_STRATEGY] = tree[_STRATEGY]
    if not values.get("dummy_run_full_ctx") and all(values.get(key) is None for key in _SOURCES):
        defaults["train_datasets"] = [f"{_DATASET}:{values.get('dataset_split') or _SPLIT}"]
    return defaults


def _convert(writing: Writing, key: str, value: Any, values: Mapping[str, Any]) -> None:
    if translation := _SFT.translated(key, value, values) or _newer_setting(key, value):
        apply(writing, key, value, translation)
    else:
        convert_one(writing, key, value, {})


def _newer_setting(key: str, value: object) -> Translation | None:
    """Outcome of a newer setting of `main_sft` that is the policy's in reinforcement learning; None for any other."""
    assignment = Assignment(path=split_path(POLICY + key), value=value, origin=Origin(kind="file"))
    try:
        followed = follow(NEWER_UPSTREAM_FIELDS, assignment)
    except ConfigError as error:
        return unsupported(error.problems[0].hint)
    if followed is None:
        return None
    moved, warnings = followed
    if moved:
        return Translation(writes={dotted(item.path).removeprefix(POLICY): item.value for item in moved})
    return redundant(warnings[0].hint)


def _sampler(key: str, value: Any, values: Mapping[str, Any]) -> Translation:
    """Convert the order of rows. A class of the user is named by `sampler_class_path`, and read with `custom` alone."""
    is_custom = values.get("sampler") == "custom"
    if key == "sampler":
        return redundant("sampler_class_path names it") if is_custom else Translation(writes={key: value})
    if not is_custom or value in (None, {}):
        return redundant("read with sampler = custom" if value not in (None, {}) else "not set")
    if key != "sampler_class_path":
        return Translation(writes={f"curriculum.{key}": value})
    module, _, name = str(value).rpartition(".")
    return Translation(
        writes={"curriculum.sampler": f"{module}:{name}"}, note="its rows have token_ids and weights, not input_ids"
    )


def _made_up_steps(key: str, value: object, values: Mapping[str, object]) -> Translation:
    """Convert steps on dummy rows of full length: a switch and a number in SkyRL, only the number here."""
    if not values.get("dummy_run_full_ctx"):
        return redundant("dummy_run_full_ctx is off")
    return Translation(writes={"num_dummy_steps": values.get("dummy_run_max_steps", _DUMMY_STEPS)})


def _sources(key: str, value: Any, values: Mapping[str, Any]) -> Translation:
    """Convert datasets with their splits; `null` means none."""
    if value is None:
        return redundant("not set")
    path = _PATHS.get(key, key)
    names = value if isinstance(value, list) else [value]
    split_value = values.get((_ONE_NAME | _NAMES)[key])
    splits = split_value if isinstance(split_value, list) else [split_value] * (1 if key in _ONE_NAME else len(names))
    if len(splits) != len(names):
        return refused(f"{len(names)} datasets, but {len(splits)} splits")
    return Translation(
        writes={path: [f"{name}:{split}" if split else str(name) for name, split in zip(names, splits, strict=True)]}
    )


def _split(key: str, value: Any, values: Mapping[str, Any]) -> Translation:
    if value is None or values.get(_SPLITS[key]) is not None:
        return redundant("part of the data source: NAME:SPLIT")
    if key == "eval_dataset_split":  # train/config/sft_config.py:497
        return redundant("read with eval_dataset_name, which is not set")
    if key == "dataset_split":
        return redundant(f"part of the default data source: {_DATASET}:{value}")
    return refused(f"{_SPLITS[key]} is not set")


def _packing(key: str, value: object, values: Mapping[str, object]) -> Translation:
    """Convert packing over the whole batch, as rows are dealt out here wherever micro-batches are bounded in tokens.
    SkyRL's bound is `max_length` if none is given (train/config/sft_config.py:229).
    """
    if not values.get("use_sequence_packing"):
        return redundant("max_tokens_per_microbatch decides")
    if values.get(_BOUND) is not None:
        return Translation(writes={"use_sequence_packing": True})
    if values.get("max_length") is None:
        return refused(f"packing needs max_length or {_BOUND}")
    return Translation(writes={"use_sequence_packing": True, _BOUND: values["max_length"]})


_SFT = System(
    keys=_KEYS,
    dependent=(
        {
            **dict.fromkeys((*_ONE_NAME, *_NAMES), _sources),
            **dict.fromkeys(_SPLITS, _split),
            **{name + end: _sampler for name in ("sampler", *_SAMPLER) for end in ("", ".*")},
            "use_sequence_packing": _packing,
            **dict.fromkeys(("dummy_run_full_ctx", "dummy_run_max_steps"), _made_up_steps),
            **profiler(""),
        },
    ),
    switches=switches("", "megatron"),
    unknown=lambda key, writing: "",
)
"""Settings of `main_sft` that its policy has under another name, or not at all."""
