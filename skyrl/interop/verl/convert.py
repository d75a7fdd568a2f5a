"""Converts verl's scripts (`key=value` after `verl.trainer.main_ppo`) and YAML files to our tables.

The tables are for verl 0.8.0.dev of January 2026: `verl/keys.py` has the settings that convert independently,
`verl/objective.py` and `verl/layout.py` the ones that depend on others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from skyrl.errors import ConfigError, Problem
from skyrl.interop.launches import RUNS, Known, Launcher, aside, launch_of, reads_images, unconverted
from skyrl.interop.report import Conversion
from skyrl.interop.systems import ProgramValue, System, convert_settings
from skyrl.interop.translation import Values
from skyrl.interop.values import flat_file, is_script, text_of, without_references, yaml_value
from skyrl.interop.verl.keys import KEYS
from skyrl.interop.verl.layout import LAYOUT, layout
from skyrl.interop.verl.objective import OBJECTIVE, has_critic
from skyrl.interop.writing import Writing

_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][^=\s]*=.*", re.DOTALL)
_OURS = re.compile(r"[+~]{0,2}(actor_rollout_ref|algorithm|critic|reward_model|trainer|data)\.\w[^=\s]*=.*", re.DOTALL)
_ASYNCHRONOUS = "verl's asynchronous trainer, whose settings are not converted; trainer.fully_async is ours"
_SUPERVISED = 'verl\'s supervised trainer, whose settings are not converted; kind = "sft" is ours'
_KNOWN: Mapping[str, Known] = {
    "verl.trainer.main_ppo": RUNS,
    "transfer_queue.main_ppo": RUNS,
    "dapo.main_dapo": RUNS,
    "one_step_off_policy.main_ppo": unconverted(_ASYNCHRONOUS),
    "one_step_off_policy.async_main_ppo": unconverted(_ASYNCHRONOUS),
    "fully_async_main": unconverted(_ASYNCHRONOUS),
    "vla.main_ppo": unconverted("a policy of images and actions, which skyrl does not train yet"),
    "fsdp_sft_trainer": unconverted(_SUPERVISED),
    "sft_trainer": unconverted(_SUPERVISED),
    "sft_trainer_ray": unconverted(_SUPERVISED),
    "spin.main_spin": unconverted("preference training, which skyrl does not have yet"),
    "sppo.main_sppo": unconverted("preference training, which skyrl does not have yet"),
    "main_generation": aside("it only samples: `skyrl generate` does that here"),
    "main_generation_server": aside("it only samples: `skyrl generate` does that here"),
    "main_eval": aside("it only evaluates: `skyrl eval` does that here"),
    "model_merger": aside("it only merges checkpoints"),
}
"""Suffix of a program's dotted name -> whether its runs are converted."""

_LAUNCHER = Launcher(name="verl", programs=_KNOWN, is_setting=lambda word: _OURS.fullmatch(word) is not None)
_NO_VALUE = "the script gives no value: one of its variables is empty"
_IMAGES = ("data.image_key=", "data.video_key=", "data.audio_key=")
_SELECT = re.compile(r"\$\{oc\.select:\s*([\w.]+)\s*(?:,.*)?\}", re.DOTALL)
_RELATIVE = re.compile(r"\$\{(\.\w+)\}")
_OWN_FILES = ("ppo_trainer", "ppo_megatron_trainer")

_ALWAYS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
_WITH_A_CRITIC: dict[str, Any] = {"critic.optim.lr": 1e-5, "critic.cliprange_value": 0.5}
_REWARDS = (
    "verl chooses the reward by each row's data_source, or by custom_reward_function: set environment.env_class to the "
    "task (gsm8k, ...) or to a reward function (rewards.py:compute_score), which may keep verl's signature."
)


def convert_verl(name: str, *, number: int | None = None) -> Conversion:
    """Convert a shell script or a YAML file. `number` chooses among several commands of a script. Raises `ConfigError`
    if the file cannot be read, if the script starts no run, or several and none is chosen, and for rows with images.
    """
    if not is_script(name):
        return convert_keys(flat_file(name, of="verl"), name)
    launch = launch_of(text_of(name), name, _LAUNCHER, number)
    based_on, launch = launch.option("--config-name", "-cn")
    _, launch = launch.option("--config-path", "-cp")
    overrides, launch = launch.split(lambda word: _OVERRIDE.fullmatch(word) is not None)
    given = dict(map(_setting, overrides))
    written = [word for command in launch.script.commands for word in command.texts]
    images = next((word for word in written if word.lstrip("+").startswith(_IMAGES) and word[-1] != "="), "")
    model = str(given.get("actor_rollout_ref.model.path"))
    images = images or (model if reads_images(model) else "")
    if images:
        message = f"line {launch.line} trains on rows with images or sound ({images}), which skyrl does not do yet"
        raise ConfigError([Problem(path=name, message=message)], title="Nothing was converted")
    return launch.finished(convert_keys(given, name, based_on=based_on.removesuffix(".yaml")))


def convert_keys(keys: Mapping[str, Any], where: str = "overrides", *, based_on: str = "") -> Conversion:
    """Convert flat dotted keys and their values. `based_on` is verl's YAML file that they override."""
    values = {key: _reference(key, value) for key, value in keys.items()}
    values, _ = without_references(
        {key: None if _names_a_table(value, values) else value for key, value in values.items()}
    )
    if based_on == "ppo_megatron_trainer":
        values = {"actor_rollout_ref.actor.strategy": "megatron", **values}
    remarks: tuple[str, ...] = () if values.get("custom_reward_function.path") or not values else (_REWARDS,)
    if based_on and based_on not in _OWN_FILES:
        remarks += (
            f"The script also uses the settings of {based_on}.yaml, which it does not contain: convert that file, too.",
        )
    return evolve(convert_settings(_VERL, values, Writing(where)), remarks=remarks)


def _setting(override: str) -> tuple[str, Any]:
    name, _, text = override.partition("=")
    key = name.lstrip("+~")
    if not text and not key.endswith(("_name", "_dir")):
        return key, ProgramValue("", _NO_VALUE)
    return key, yaml_value(text)


def _reference(key: str, value: object) -> Any:
    """The value with `${oc.select:a.b,default}` and `${.b}`, which is relative to the key's table, as `${a.b}`."""
    match = _SELECT.fullmatch(value) or _RELATIVE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    return "${" + (key.rpartition(".")[0] + match[1] if match[1].startswith(".") else match[1]) + "}"


def _names_a_table(value: object, values: Values) -> bool:
    """Whether the value is a reference to a whole table, whose settings are in the file."""
    name = value[2:-1] if isinstance(value, str) and value.startswith("${") else ""
    return bool(name) and any(key.startswith(name + ".") for key in values)


def _left_out(values: Values) -> dict[str, Any]:
    """verl's defaults on which a complete experiment relies."""
    if "actor_rollout_ref.model.path" not in values:
        return {}
    defaults = _ALWAYS | (_WITH_A_CRITIC if has_critic(_ALWAYS | dict(values)) else {})
    return {key: value for key, value in defaults.items() if key not in values}


_VERL = System(
    keys=KEYS,
    dependent=(OBJECTIVE | LAYOUT,),
    unknown=lambda key, writing: "not known to this converter, which covers the settings of verl 0.8",
    defaults=_left_out,
    implied=layout,
)
