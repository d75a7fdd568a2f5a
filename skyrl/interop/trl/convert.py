"""Converts TRL's arguments of GRPO to our tables, for TRL 1.10 of July 2026 and transformers 5.17."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl.interop.report import Conversion
from skyrl.interop.systems import System, convert_settings
from skyrl.interop.translation import Values
from skyrl.interop.trl.dependent import DEPENDENT, implied
from skyrl.interop.trl.keys import KEYS
from skyrl.interop.trl.sources import settings_of
from skyrl.interop.writing import Writing

_ALWAYS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "max_completion_length": 512,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "beta": 0.0,
    "loss_type": "dapo",
    "use_vllm": False,
    "save_steps": 500,
    "eval_strategy": "no",
    "eval_on_start": False,
}
_WITH_VLLM: dict[str, Any] = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_gpu_memory_utilization": 0.3}
_WITH_ADAPTERS: dict[str, Any] = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}

_PROCESSES = (
    "TRL gets the number of GPUs, which determines batch sizes, from the command that starts it; 1 was assumed. "
    "Convert the script with `accelerate launch --num_processes`, or add num_processes to the file."
)
_PROMPTS = (
    "TRL accepts prompts of any length; here, prompts longer than trainer.max_prompt_length tokens are skipped and "
    "counted."
)
_REWARDS = (
    "TRL's trainer receives reward functions from the program: set environment.env_class to one of them "
    "(rewards.py:my_reward), which may keep TRL's signature."
)


def convert_trl(name: str, *, number: int | None = None) -> Conversion:
    """Convert a Python program, a shell script, or a YAML file. `number` chooses among several commands of a script.
    Raises `ConfigError` if the file cannot be read, or trains something else than GRPO.
    """
    keys, launch = settings_of(name, number)
    converted = convert_keys(keys, name)
    return launch.finished(converted) if launch else converted


def convert_keys(keys: Mapping[str, Any], where: str = "arguments") -> Conversion:
    """Convert TRL's arguments, given as a mapping from name to value."""
    system = System(
        keys=KEYS,
        dependent=(DEPENDENT,),
        unknown=lambda key, writing: "not known to this converter, which covers the settings of TRL 1.10",
        defaults=_left_out,
        implied=implied,
    )
    outside = {"num_processes": _PROCESSES, "max_prompt_length": _PROMPTS, "reward_funcs": _REWARDS}
    remarks = tuple(remark for key, remark in outside.items() if key not in keys)
    return evolve(convert_settings(system, keys, Writing(where)), remarks=remarks)


def _left_out(values: Values) -> dict[str, Any]:
    """TRL's defaults on which a complete run relies."""
    if "model_name_or_path" not in values:
        return {}
    defaults = dict(_ALWAYS)
    if values.get("use_vllm"):
        defaults |= _WITH_VLLM
    if values.get("use_peft"):
        defaults |= _WITH_ADAPTERS
    return {key: value for key, value in defaults.items() if key not in values}
