"""Converts verl's supervised trainers (`sft_trainer`, `sft_trainer_ray`, the older `fsdp_sft_trainer`) to
`kind = "sft"`. Their tables of models, optimizers and sharding are those of the policy in verl's RL trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import evolve

from skyrl.config import SFTConfig
from skyrl.config.settings.strategies import has_own_modules
from skyrl.interop.report import Conversion
from skyrl.interop.systems import Switch, System, convert_settings, other_folder
from skyrl.interop.translation import (
    Dependent,
    Entry,
    Translation,
    Values,
    count,
    dependent_of_one_model,
    entry_of_one_model,
    fixed,
    is_off,
    missing,
    redundant,
    refused,
    sources,
    translate,
    unsupported,
    word,
)
from skyrl.interop.verl.keys import KEYS
from skyrl.interop.verl.layout import LAYOUT
from skyrl.interop.verl.switches import SWITCHES
from skyrl.interop.writing import Writing
from skyrl.tree.types import display_value

_POLICY = "actor_rollout_ref."
_TABLES = {
    "model.fsdp_config.": f"{_POLICY}actor.fsdp_config.",
    "model.": f"{_POLICY}model.",
    "engine.": f"{_POLICY}actor.fsdp_config.",
    "optim.": f"{_POLICY}actor.optim.",
    "profiler.": f"{_POLICY}actor.profiler.",
}
"""Table of a supervised file -> the table of the RL trainer whose settings have the same meaning."""

_ENGINE = f"{_POLICY}actor.fsdp_config."
_ENGINES = ("fsdp", "fsdp2")
_READING = "affects how verl reads files; rows are read and tokenized before the first step"
_OLD = ("model.partial_pretrain", "data.multiturn.enable")
_ROWS = "rows of a question and an answer in columns of other names; rename them to instruction and output"
_ONLY_SUPERVISED = ("engine.", "optim.", "data.messages_key", "data.micro_batch_size_per_gpu", *_OLD)

_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "data.max_length": 1024,
    "optim.lr": 1e-3,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
}
"""verl's defaults that change what is learned, where a file omits them."""

_OLD_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 1024,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler": "cosine",
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
}
"""The same for `fsdp_sft_trainer`."""


def is_supervised(values: Iterable[str]) -> bool:
    """Whether the settings are those of a supervised trainer."""
    keys = [*values]
    return any(key.startswith(_ONLY_SUPERVISED) for key in keys) and not any(
        key.startswith((_POLICY, "algorithm.")) for key in keys
    )


def convert_supervised(
    settings: Values, where: str, *, gpus: tuple[int, int] | None = None, is_old: bool = False
) -> Conversion:
    """Convert settings whose references are resolved. `gpus` are the nodes and the processes of each that `torchrun`
    starts; None: the file says it. `is_old`: they are those of `fsdp_sft_trainer`.
    """
    is_old = is_old or any(key.startswith(_OLD) for key in settings)
    names = {_renamed(key): key for key in settings}
    values = {key: settings[name] for key, name in names.items()}
    of_engines = (_ENGINE + "*", f"{_POLICY}actor.optim.optimizer", f"{_POLICY}actor.optim.optimizer_impl")
    system = System(
        keys=_KEYS,
        dependent=(dict.fromkeys(of_engines, _unused_engine), _DEPENDENT),
        switches=_SWITCHES,
        unknown=lambda key, writing: "not known to this converter, which covers verl's supervised trainers up to 0.9.1",
        defaults=lambda values: _left_out(values, is_old),
        reports_defaults=True,
        implied=lambda values: _implied(values, gpus),
        other_defaults=other_folder(
            "trainer.default_local_dir",
            "checkpoints/{trainer.project_name=gsm8k-sft}/{trainer.experiment_name=test}",
            "ckpt_path",
            model=f"{_POLICY}model.{'partial_pretrain' if is_old else 'path'}",
        ),
    )
    conversion = convert_settings(system, values, Writing(where, SFTConfig))
    named = {**{_renamed(key): key for key in (*_DEFAULTS, *_OLD_DEFAULTS)}, **names}
    return evolve(
        conversion,
        lines=tuple(evolve(line, source=named.get(line.source, line.source)) for line in conversion.lines),
        defaults=tuple(evolve(line, source=named.get(line.source, line.source)) for line in conversion.defaults),
    )


def _renamed(key: str) -> str:
    table = next((table for table in _TABLES if key.startswith(table)), "")
    return _TABLES[table] + key.removeprefix(table) if table else key


def _left_out(values: Values, is_old: bool) -> dict[str, Any]:
    if "actor_rollout_ref.model.path" not in values and "actor_rollout_ref.model.partial_pretrain" not in values:
        return {}
    defaults = {_renamed(key): value for key, value in (_OLD_DEFAULTS if is_old else _DEFAULTS).items()}
    if is_old and not values.get("data.multiturn.enable"):
        defaults["data.prompt_key"] = "question"
    return {key: value for key, value in defaults.items() if key not in values}


def _implied(values: Values, gpus: tuple[int, int] | None) -> Iterator[tuple[str, str, Any]]:
    yield "implied", "train_on_what", "all_assistant_messages"
    yield "implied", "eval_before_train", False
    yield "implied", "device", "cuda"
    if gpus:
        yield "torchrun", "placement.num_nodes", gpus[0]
        yield "torchrun", "placement.num_gpus_per_node", gpus[1]


def _strategy(key: str, value: object, values: Values) -> Translation:
    if value in _ENGINES:
        return Translation(writes={"strategy": value})
    return unsupported(
        "Megatron learners in supervised runs" if has_own_modules(value) else f"strategy {display_value(value)}"
    )


def _unused_engine(key: str, value: object, values: Values) -> Translation | None:
    named = values.get("engine") or values.get(_ENGINE + "strategy") or values.get(f"{_POLICY}model.strategy")
    engine = str(named or ("megatron" if _ENGINE + "tensor_model_parallel_size" in values else "fsdp"))
    if engine in _ENGINES:
        return None
    names = [_ENGINE + "strategy", _ENGINE + "tensor_model_parallel_size"]
    if "engine" not in values and key == next((name for name in names if name in values), ""):
        return _strategy(key, engine, values)
    return redundant(f"only read by the engine {engine}, which is not implemented in supervised runs")


def _group(key: str, value: object, values: Values) -> Translation:
    """Convert a choice of Hydra among verl's files: `engine=megatron`, `model=hf_model`."""
    if key == "engine":
        return _strategy(key, value, values)
    return redundant("one of verl's files of defaults, chosen together with engine")


def _checkpoints(key: str, value: object, values: Values) -> Translation:
    path = {"trainer.save_freq": "ckpt_interval", "trainer.test_freq": "eval_interval"}[key]
    if key == "trainer.test_freq" and is_off(values.get("data.val_files")):
        return redundant("no effect: there are no val_files")
    return Translation(writes={path: "1 epoch" if value == "after_each_epoch" else value})


def _tokens(key: str, value: object, values: Values) -> Translation:
    if not values.get("data.use_dynamic_bsz"):
        return redundant("use_dynamic_bsz is off")
    return Translation(writes={"max_tokens_per_microbatch": value})


def _rows(key: str, value: object, values: Values) -> Translation:
    if value is None or values.get("data.use_dynamic_bsz"):
        return redundant("not set" if value is None else "micro-batches are counted in tokens")
    return Translation(writes={"micro_train_batch_size_per_gpu": value})


def _truncation(key: str, value: object, values: Values) -> Translation:
    if value == "error":
        return redundant("longer rows are skipped and counted; verl ends with an error")
    if value == "right" or values.get("data.pad_mode", "no_padding") == "no_padding":
        return Translation(writes={"too_long": "truncate"})
    return unsupported("rows cut from the left")


def _resume(key: str, value: object, values: Values) -> Translation:
    path = values.get("trainer.resume_from_path")
    if key.endswith("resume_from_path"):
        return redundant("not set" if is_off(value) else "set by resume_mode")
    ours = {"auto": "latest", "disable": "", "resume_path": path or ""}
    mode = word(values.get("trainer.resume_mode", "auto"), ours)
    if mode not in ours:
        return refused(f"unknown resume_mode {display_value(mode)}; verl supports: {', '.join(ours)}")
    return Translation(writes={"resume_from": ours[mode]})


def _nodes(key: str, value: object, values: Values) -> Translation:
    ours = {"trainer.nnodes": "num_nodes", "trainer.n_gpus_per_node": "num_gpus_per_node"}[key]
    if not isinstance(value, int):
        return refused(f"{display_value(value)} is not a number of nodes or GPUs: replace it with its value")
    return Translation(writes={f"placement.{ours}": count(value)})


def _columns(key: str, value: object, values: Values) -> Translation:
    """Convert the columns of a question and an answer, which the older trainer has beside chats."""
    if value is None or values.get("data.multiturn.enable"):
        return redundant("not set" if value is None else "rows are chats: multiturn.enable is on")
    return unsupported(_ROWS)


def _profiled(key: str, value: object, values: Values) -> Translation:
    """Convert the first and the last step that are profiled."""
    if value in ([-1, -1], None) or is_off(values.get(f"{_POLICY}actor.profiler.enable")):
        return redundant("no step is profiled")
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(step, int) for step in value):
        return refused("verl needs the first step and the last")
    return Translation(writes={"profile_steps": [*range(value[0], value[1] + 1)]})


_DATA: dict[str, Entry] = {
    "train_files": sources("train_datasets"),
    "val_files": lambda value: redundant("not set") if is_off(value) else translate(sources("eval_datasets"), value),
    "train_batch_size": "batch_size",
    "micro_batch_size": redundant("set by micro_batch_size_per_gpu"),
    "use_dynamic_bsz": redundant("set by max_token_len_per_gpu, or by micro_batch_size_per_gpu"),
    "messages_key": "messages_key",
    "multiturn.messages_key": "messages_key",
    "tools_key": "tools_key",
    "multiturn.tools_key": "tools_key",
    "multiturn.enable": redundant("rows are chats, or have the columns of docs/sft.md"),
    "enable_thinking_key": fixed(
        "enable_thinking", does="check the rows: a column with a value for each row is not read",
        otherwise="thinking that each row turns on",
    ),
    "multiturn.enable_thinking_key": redundant("check the rows: a column with a value for each row is not read"),
    "enable_thinking_default": lambda value: (
        redundant("not set") if value in (None, "none")
        else Translation(writes={"chat_template_kwargs.enable_thinking": value})
    ),
    "max_length": "max_length",
    "pad_mode": redundant("padding does not affect results"),
    "balance_dp_token": redundant("rows are balanced across ranks"),
    "chat_template": missing("an inline chat template; set chat_template to a file with it"),
    "custom_cls.*": missing("custom dataset classes; train_datasets accepts files, folders and Hub datasets", ""),
    "apply_chat_template_kwargs": missing("a value for a whole table; set its fields instead", {}),
    "train_max_samples": fixed(-1, does="all rows are used", otherwise="a subset of rows: NAME:train[:100]"),
    "val_max_samples": fixed(-1, does="all rows are used", otherwise="a subset of rows: NAME:test[:100]"),
    "ignore_input_ids_mismatch": redundant("a whole chat is tokenized at once, so that nothing can differ"),
    "image_key": fixed("images", None, does="rows have no images", otherwise="rows with images"),
    "video_key": fixed("videos", None, does="rows have no videos", otherwise="rows with videos"),
    **dict.fromkeys(("use_shm", "num_workers", "image_patch_size", "shuffle", "seed"), redundant(_READING)),
}  # fmt: skip

_TRAINER: dict[str, Entry] = {
    "total_epochs": "num_epochs",
    "total_training_steps": "num_steps",
    "project_name": "project_name",
    "experiment_name": "run_name",
    "default_local_dir": "ckpt_path",
    "default_hdfs_dir": missing("HDFS; ckpt_path may be an object store (docs/checkpoints.md)"),
    "max_ckpt_to_keep": "max_ckpts_to_keep",
    "seed": "seed",
    "device": fixed("cuda", does="models run on GPUs", otherwise="devices other than CUDA"),
    "balance_batch": redundant("rows are balanced across ranks"),
    "checkpoint.*": redundant("checkpoints always contain all that resuming needs"),
}

_SHARED_KEYS = (f"{_POLICY}model.", f"{_POLICY}actor.optim.", f"{_POLICY}actor.fsdp_config.")

_KEYS: dict[str, Entry] = {
    "*._target_": redundant("names a verl class"),
    **{
        key: entry_of_one_model(entry)
        for key, entry in KEYS.items()
        if key.startswith((*_SHARED_KEYS, "*.")) and not key.startswith(("*.data_loader", "*.rollout"))
    },
    f"{_POLICY}model.partial_pretrain": "model.path",
    f"{_POLICY}model.strategy": lambda value: _strategy("", value, {}),
    f"{_ENGINE}param_offload": redundant("the model stays on its GPUs: affects memory, not results"),
    f"{_ENGINE}ulysses_sequence_parallel_size": "sequence_parallel_size",
    "ulysses_sequence_parallel_size": "sequence_parallel_size",
    "use_remove_padding": "use_sequence_packing",
    f"{_POLICY}model.use_remove_padding": "use_sequence_packing",
    **{f"data.{name}": entry for name, entry in _DATA.items()},
    **{f"trainer.{name}": entry for name, entry in _TRAINER.items()},
    "checkpoint.async_save": "async_ckpt_save",
    "checkpoint.*": redundant("checkpoints always contain all that resuming needs"),
}

_DEPENDENT: dict[str, Dependent] = {
    **dict.fromkeys(("model", "engine", "optim", "model_engine"), _group),
    "trainer.nnodes": _nodes,
    "trainer.n_gpus_per_node": _nodes,
    "trainer.save_freq": _checkpoints,
    "trainer.test_freq": _checkpoints,
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": _resume,
    "trainer.logger": dependent_of_one_model(LAYOUT["trainer.logger"]),
    "trainer.profile_interval": _profiled,
    **dict.fromkeys(
        ("checkpoint.save_contents", "trainer.checkpoint.save_contents"),
        dependent_of_one_model(LAYOUT["*.save_contents"]),
    ),
    "data.max_token_len_per_gpu": _tokens,
    "data.micro_batch_size_per_gpu": _rows,
    "data.truncation": _truncation,
    **dict.fromkeys(
        [f"data.{side}_{kind}" for side in ("prompt", "response") for kind in ("key", "dict_keys")], _columns
    ),
    "data.apply_chat_template_kwargs.*": lambda key, value, values: Translation(
        writes={f"chat_template_kwargs.{key.partition('kwargs.')[2]}": value}
    ),
    f"{_POLICY}actor.optim.lr_scheduler": dependent_of_one_model(LAYOUT["*.lr_scheduler_type"]),
    f"{_POLICY}actor.optim.warmup_steps_ratio": dependent_of_one_model(LAYOUT["*.lr_warmup_steps_ratio"]),
    f"{_POLICY}actor.fsdp_config.strategy": _strategy,
    **{
        key: dependent_of_one_model(entry)
        for key, entry in LAYOUT.items()
        if key.startswith(("*", *_SHARED_KEYS)) and key not in ("*.strategy", "*.save_contents")
    },
}
"""Settings whose meaning depends on others."""

_SWITCHES: tuple[Switch, ...] = tuple(
    switch for switch in SWITCHES if switch.key.startswith(("*.", f"{_POLICY}model."))
)


def with_torchrun(words: Iterable[str]) -> tuple[int, int] | None:
    """Nodes, and processes of each, that a launcher before the program starts; None if there is none, or if it says
    neither.
    """
    options: dict[str, str] = {}
    remaining = iter(words)
    for option in remaining:
        name, equals, text = option.lstrip("-").replace("_", "-").partition("=")
        if option.startswith("--") and name in ("nnodes", "nproc-per-node"):
            options[name] = text if equals else next(remaining, "")
    numbers: Mapping[str, int] = {name: int(text) for name, text in options.items() if text.isdecimal()}
    return (numbers.get("nnodes", 1), numbers.get("nproc-per-node", 1)) if numbers else None
