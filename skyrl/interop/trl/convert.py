"""Converts TRL's arguments of GRPO, RLOO, SFT, reward models, DPO, KTO and distillation to our tables, for TRL
1.16, 0.27 and 0.18 and open-r1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from attrs import evolve

from skyrl.config import PreferenceConfig, RewardModelConfig, SFTConfig, SkyRLTrainConfig
from skyrl.interop.peer_trees import PeerTree
from skyrl.interop.report import Conversion
from skyrl.interop.systems import Switch, System, convert_settings, other_folder, other_than
from skyrl.interop.translation import Values, is_off, number
from skyrl.interop.trl import supervised
from skyrl.interop.trl.dependent import DEPENDENT, OF_RLOO, implied, implied_by_rloo
from skyrl.interop.trl.keys import KEYS
from skyrl.interop.trl.sources import PREFERENCES, kinds_with, settings_of, tree_of
from skyrl.interop.writing import Writing

_GRPO = "trl/trainer/grpo_trainer.py"
_ARGUMENTS = "trl/trainer/utils.py"

SWITCHES: tuple[Switch, ...] = (
    Switch("use_peft", ("lora_*", "use_rslora", "use_dora"), f"{_ARGUMENTS}:281"),
    Switch("load_in_4bit", ("bnb_4bit_*", "use_bnb_nested_quant"), f"{_ARGUMENTS}:262"),
    Switch("use_vllm", ("vllm_*",), f"{_GRPO}:1105"),
    Switch("vllm_importance_sampling_correction", ("vllm_importance_sampling_*",), f"{_GRPO}:3146", default=True),
    Switch("use_transformers_continuous_batching", ("transformers_continuous_batching_config",), f"{_GRPO}:794"),
    Switch("sync_ref_model", ("ref_model_mixup_alpha", "ref_model_sync_steps"), f"{_GRPO}:1190"),
    Switch(
        "use_adaptive_entropy",
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        f"{_GRPO}:3206",
    ),
    Switch(
        "beta", ("use_bias_correction_kl",), f"{_GRPO}:3099", default=0.0, is_off=lambda value: is_off(number(value))
    ),
    Switch("loss_type", ("sapo_*",), f"{_GRPO}:3121", default="dapo", is_off=other_than("sapo")),
    Switch("loss_type", ("vespo_*",), f"{_GRPO}:3125", default="dapo", is_off=other_than("vespo")),
    Switch("packing", ("packing_strategy",), "trl/trainer/sft_trainer.py:916"),
    Switch(
        "gradient_checkpointing",
        ("gradient_checkpointing_kwargs", "gradient_checkpointing_use_reentrant"),
        "transformers/trainer.py:1503",
        default=True,
    ),
    Switch("use_liger_kernel", ("liger_kernel_config",), "transformers/trainer.py:1494"),
    Switch(
        "eval_strategy",
        ("eval_delay", "eval_steps", "num_generations_eval"),
        "transformers/trainer_callback.py:577",
        default="no",
        is_off=lambda value: value in ("no", False, None),
    ),
)
"""Settings that turn features on; lines are those of TRL 1.16.0 and transformers 5.19.0."""


_RELIED_ON = (
    "per_device_train_batch_size", "num_generations", "max_completion_length", "max_prompt_length", "num_train_epochs",
    "learning_rate", "lr_scheduler_type", "weight_decay", "beta", "loss_type", "scale_rewards", "temperature", "bf16",
    "use_vllm", "vllm_importance_sampling_mode", "vllm_gpu_memory_utilization", "lora_r", "lora_alpha", "lora_dropout",
    "max_length", "save_steps", "eval_strategy", "eval_on_start",
)  # fmt: skip
"""Settings whose defaults are written where a complete run leaves them out."""

_OF_KIND = {"kto": ("train_sampling_strategy",)}
"""Trainer -> further such settings."""

_DECIDING: dict[str, dict[str, Any]] = {
    "distillation": {"teacher_model_name_or_path": None},
    "gkd": {"teacher_model_name_or_path": None, "lmbda": 0.5},
}
"""Trainer -> settings with their defaults that are reported even where a file leaves them out."""

_SUPERVISED = {
    "sft": (SFTConfig, supervised.KEYS, supervised.SUPERVISED, supervised.implied_by_chats),
    "reward": (RewardModelConfig, supervised.OF_REWARDS, supervised.SUPERVISED, supervised.implied_by_rows),
    **dict.fromkeys(PREFERENCES, (PreferenceConfig, supervised.PAIRS, supervised.OF_PAIRS, supervised.implied_by_rows)),
    "gkd": (SFTConfig, supervised.GKD, supervised.OF_GKD, supervised.implied_by_gkd),
}
"""Trainer -> the class of our tree, the settings that convert independently, those that depend on others, and what
follows from several.
"""

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
    "(rewards.py:my_reward), or to a list, which may keep TRL's signature."
)
_TASK = (
    "TRL's distillation has no rewards: set environment.env_class to a task whose rewards are reported, such as a "
    "function that returns 0 (rewards.py:nothing); distillation.task_coef = 0 keeps them out of the loss."
)
_SERVERS = (
    "TRL {version} samples from servers of `trl vllm-serve`, unless vllm_mode is colocate; here engines share the GPUs "
    "of the learners."
)
_LEFT_OUT = (
    "TRL cuts answers at max_length; here a row with a longer side is left out and counted, since a shortened answer "
    "is another one."
)
_BIAS_CORRECTION = (
    "TRL multiplies the KL divergence by the ratio of probabilities, since use_bias_correction_kl is on by default; "
    "here, as in its earlier versions, it is added as it is."
)


def convert_trl(name: str, *, number: int | None = None, kind: str | None = None) -> Conversion:
    """Convert a Python program, a shell script, or a YAML file. `number` chooses among several commands of a script,
    and `kind` is the trainer (grpo, sft, dpo, distillation, ...) where the file does not name it. Raises `ConfigError`
    if the file cannot be read, or trains something else.
    """
    keys, launch, trainer = settings_of(name, number, kind)
    converted = convert_keys(keys, name, kind=trainer)
    return launch.finished(converted) if launch else converted


def convert_keys(keys: Mapping[str, Any], where: str = "arguments", *, kind: str = "grpo") -> Conversion:
    """Convert the arguments of one of TRL's trainers, given as a mapping from name to value."""
    keys = {**_DECIDING.get(kind, {}), **keys}
    tree, notice = tree_of(kind, keys)
    system = _system(kind, tree)
    root = _SUPERVISED[kind][0] if kind in _SUPERVISED else SkyRLTrainConfig
    converted = convert_settings(system, keys, Writing(where, root))
    return evolve(converted, notice=notice, remarks=tuple(_remarks(kind, keys, tree)))


_folder = partial(other_folder, "output_dir", "trainer_output", model="model_name_or_path")


def _system(kind: str, tree: PeerTree) -> System:
    def unknown(key: str, writing: Writing) -> str:
        others = [other for other in kinds_with(key) if other != kind]
        if others:
            return f"an argument of TRL's {' and '.join(others)}; its {kind} does not have it"
        return f"not an argument of TRL 1.16, 0.27 or 0.18: its {kind} does not have it"

    grpo = System(
        keys=KEYS,
        dependent=(DEPENDENT,),
        switches=SWITCHES,
        unknown=unknown,
        defaults=lambda values: _left_out(values, tree),
        implied=implied,
        other_defaults=_folder("trainer.run_path"),
    )
    if kind in _SUPERVISED:
        _, keys, dependent, implied_by = _SUPERVISED[kind]
        other = _folder("run_path")
        return evolve(grpo, keys=keys, dependent=(dependent,), implied=implied_by, other_defaults=other)
    if kind == "distillation":
        return evolve(
            grpo,
            keys=supervised.DISTILLATION,
            dependent=(supervised.OF_DISTILLATION, DEPENDENT),
            defaults=lambda values: {**_left_out(values, tree), "num_generations": 1},
            implied=supervised.implied_by_distillation,
        )
    if kind == "rloo":
        return evolve(grpo, dependent=(OF_RLOO, DEPENDENT), implied=implied_by_rloo)
    return grpo


def _left_out(values: Values, tree: PeerTree) -> dict[str, Any]:
    """TRL's defaults on which a complete run relies."""
    relied_on: tuple[str, ...] = ("num_generations",) if tree.kind == "rloo" else ()
    if "model_name_or_path" in values:
        relied_on = (*_RELIED_ON, *_OF_KIND.get(tree.kind, ()))
    return {key: tree.defaults[key] for key in relied_on if key in tree.defaults and key not in values}


def _remarks(kind: str, keys: Mapping[str, Any], tree: PeerTree) -> Iterable[str]:
    if "num_processes" not in keys:
        yield _PROCESSES
    if kind in PREFERENCES and keys.get("max_length", 1024) is not None:
        yield _LEFT_OUT
    if kind in _SUPERVISED:
        return
    if "max_prompt_length" not in keys:
        yield _PROMPTS
    if keys.get("use_vllm") and "vllm_mode" not in keys and tree.defaults.get("vllm_mode") == "server":
        yield _SERVERS.format(version=tree.version)
    if kind == "distillation":
        yield _TASK
        return
    if "reward_funcs" not in keys:
        yield _REWARDS
    has_divergence = not is_off(number(keys.get("beta", tree.defaults.get("beta"))))
    by_default = "use_bias_correction_kl" not in keys and tree.defaults.get("use_bias_correction_kl")
    if has_divergence and by_default:
        yield _BIAS_CORRECTION
