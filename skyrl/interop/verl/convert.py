"""Converts verl's scripts (`key=value` after `verl.trainer.main_ppo`) and YAML files to our tables.

The tables are for verl up to 0.9.1: `verl/keys.py` has the settings that convert independently, `verl/switches.py`
those below a feature that is off, and `objective.py`, `layout.py` and `asynchronous.py` the ones that depend on others.
`supervised.py` converts supervised runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from skyrl.interop import not_converted
from skyrl.interop.launches import RUNS, PeerPrograms, ProgramFacts, aside, launch_of, reads_images, unconverted
from skyrl.interop.peer_trees import peer_trees, versions_with
from skyrl.interop.report import Conversion
from skyrl.interop.systems import ProgramValue, System, convert_settings, other_folder
from skyrl.interop.translation import Values, number
from skyrl.interop.values import flat_file, is_script, without_references, yaml_value
from skyrl.interop.verl.asynchronous import (
    ASYNCHRONOUS,
    DEFAULT_THRESHOLD,
    FULLY_ASYNC,
    OF_V1,
    ONE_STEP_OFF,
    THRESHOLD,
    V1,
    mode_of,
)
from skyrl.interop.verl.keys import KEYS
from skyrl.interop.verl.layout import LAYOUT, layout, strategy_of
from skyrl.interop.verl.objective import CRITIC, DISTILLATION, OBJECTIVE, REWARDS, has_critic, reward_path
from skyrl.interop.verl.supervised import convert_supervised, is_supervised, with_torchrun
from skyrl.interop.verl.switches import SWITCHES
from skyrl.interop.writing import Writing
from skyrl.tree.files import read_text

_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][^=\s]*=.*", re.DOTALL)
_OURS = re.compile(
    r"[+~]{0,2}(actor_rollout_ref|algorithm|critic|reward|reward_model|trainer|data|async_training|rollout|optim|engine|model)\.\w[^=\s]*=.*",
    re.DOTALL,
)
_SUPERVISED = ("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray")
_KNOWN: Mapping[str, ProgramFacts] = {
    **dict.fromkeys((
        "verl.trainer.main_ppo", "transfer_queue.main_ppo", "dapo.main_dapo", "verl.trainer.main_ppo_sync",
        "one_step_off_policy.main_ppo", "one_step_off_policy.async_main_ppo", "fully_async_main", *_SUPERVISED,
    ), RUNS),
    "vla.main_ppo": unconverted("a policy of images and actions, which skyrl does not train yet"),
    **dict.fromkeys(
        ("spin.main_spin", "sppo.main_sppo"), unconverted("preference training, which skyrl does not have yet")
    ),
    **dict.fromkeys(
        ("main_generation", "main_generation_server"), aside("it only samples: `skyrl generate` does that here")
    ),
    "main_eval": aside("it only evaluates: `skyrl eval` does that here"),
    "model_merger": aside("it only merges checkpoints"),
}  # fmt: skip
"""Suffix of a program's dotted name -> whether its runs are converted."""

_LAUNCHER = PeerPrograms(name="verl", programs=_KNOWN, is_setting=lambda word: _OURS.fullmatch(word) is not None)
_IMAGES = ("data.image_key=", "data.video_key=", "data.audio_key=")
_SELECT = re.compile(r"\$\{oc\.select:\s*([\w.]+)\s*(?:,(.*))?\}", re.DOTALL)
_RELATIVE = re.compile(r"\$\{(\.\w+)\}")
_OWN_FILES = {
    "ppo_trainer": "",
    "ppo_megatron_trainer": "megatron",
    "fully_async_ppo_trainer": "",
    "fully_async_ppo_megatron_trainer": "megatron",
    "one_step_off_ppo_trainer": "",
    "one_step_off_ppo_megatron_trainer": "megatron",
}
"""verl's files of defaults -> the learners' strategy, where it is not FSDP."""

_ADDED: Mapping[str, Mapping[str, Any]] = {
    "fully_async_main": FULLY_ASYNC,
    "one_step_off_policy.main_ppo": ONE_STEP_OFF,
    "one_step_off_policy.async_main_ppo": ONE_STEP_OFF,
    "dapo.main_dapo": {"reward_model.reward_manager": "dapo"},
}
"""Suffix of a program's dotted name -> the defaults of its file beside those of the RL trainer."""

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
    "actor_rollout_ref.rollout.enforce_eager": False,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
_EVALUATION = "actor_rollout_ref.rollout.val_kwargs."
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
        keys = flat_file(name, of="verl")
        _refuse_images(name, "trains", _reading_model(keys))
        return convert_keys(keys, name)
    launch = launch_of(read_text(name), name, _LAUNCHER, number)
    based_on, launch = launch.option("--config-name", "-cn")
    _, launch = launch.option("--config-path", "-cp")
    overrides, launch = launch.split(lambda word: _OVERRIDE.fullmatch(word) is not None)
    settings = dict(map(_setting, overrides))
    written = [word for command in launch.script.commands for word in command.texts]
    images = next((word for word in written if word.lstrip("+").startswith(_IMAGES) and word[-1] != "="), "")
    _refuse_images(name, f"line {launch.line} trains", images or _reading_model(settings))
    base = based_on.removesuffix(".yaml")
    if launch.program.endswith(_SUPERVISED):
        keys, _ = without_references(_resolved(settings))
        is_old = launch.program.endswith("fsdp_sft_trainer")
        gpus = None if launch.program.endswith("_ray") else with_torchrun(launch.before)
        conversion = convert_supervised(keys, name, gpus=gpus, is_old=is_old)
        return launch.finished(evolve(conversion, notice=_version(keys, "sft")))
    return launch.finished(convert_keys(settings, name, based_on=base, program=launch.program))


def _reading_model(settings: Values) -> str:
    """The model, if it reads images; empty otherwise."""
    names = ("actor_rollout_ref.model.path", "model.path", "model.partial_pretrain")
    return next((model for name in names if reads_images(model := str(settings.get(name)))), "")


def _refuse_images(name: str, prefix: str, images: str) -> None:
    """Raise `ConfigError` for rows with images, of which only the text would be trained on."""
    if images:
        raise not_converted(name, f"{prefix} on rows with images or sound ({images}), which skyrl does not do yet")


def convert_keys(
    keys: Mapping[str, Any], where: str = "overrides", *, based_on: str = "", program: str = ""
) -> Conversion:
    """Convert flat dotted keys and their values. `based_on` is verl's YAML file that they override, `program` the one
    that reads them.
    """
    values, _ = without_references(_resolved(keys))
    if is_supervised(values):
        return evolve(convert_supervised(values, where), notice=_version(keys, "sft"))
    engine = values.get("model_engine") or _OWN_FILES.get(based_on)
    if engine:
        values = {"actor_rollout_ref.actor.strategy": engine, **values}
    remarks: tuple[str, ...] = () if reward_path(values) or not values else (_REWARDS,)
    if based_on and based_on not in _OWN_FILES:
        remarks += (
            f"The script also uses the settings of {based_on}.yaml, which it does not contain: convert that file, too.",
        )
    remarks += tuple(_greedy(values))
    added = next((added for name, added in _ADDED.items() if f".{program}".endswith(f".{name}")), {})
    system = evolve(_VERL, defaults=lambda settings: _left_out({**added, **settings}, settings))
    mode = mode_of({**added, **values})
    notice = _version(keys, mode if mode in ("fully_async", "one_step_off") else strategy_of(values))
    return evolve(convert_settings(system, values, Writing(where)), notice=notice, remarks=remarks)


def _greedy(values: Values) -> Iterable[str]:
    """A remark where versions of verl differ: those before 0.7 are greedy in evaluation unless do_sample is true."""
    temperature = number(values.get(_EVALUATION + "temperature"))
    if isinstance(temperature, int | float) and temperature > 0 and values.get(_EVALUATION + "do_sample") is not True:
        yield (
            f"Evaluation samples with val_kwargs.temperature = {temperature:g}, as in verl since 0.7. "
            "Earlier versions are greedy unless val_kwargs.do_sample is true: for that, set "
            "generator.eval_sampling_params.temperature = 0."
        )


def _version(keys: Iterable[str], kind: str) -> str:
    """The version of verl that the settings are of, if they tell the known versions apart."""
    trees = peer_trees("verl", kind)
    known, versions = [tree.version for tree in trees], versions_with(trees, keys)
    if not versions or len(versions) == len(known):
        return ""
    return f"The settings are those of verl {' and '.join(versions)} (known here: {', '.join(known)})."


def _resolved(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The values with references in one form, and without those to whole tables."""
    values = {key: _reference(key, value, keys) for key, value in keys.items()}
    return {key: None if _names_a_table(value, values) else value for key, value in values.items()}


def _setting(override: str) -> tuple[str, Any]:
    name, _, text = override.partition("=")
    key = name.lstrip("+~")
    if not text and not key.endswith(("_name", "_dir")):
        return key, ProgramValue("", "the script gives no value: one of its variables is empty")
    return key, yaml_value(text)


def _reference(key: str, value: object, keys: Values) -> Any:
    """The value with `${oc.select:a.b,default}` and `${.b}`, which is relative to the key's table, as `${a.b}`, or as
    the default, if there is no such key or table.
    """
    match = _SELECT.fullmatch(value) or _RELATIVE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    name = key.rpartition(".")[0] + match[1] if match[1].startswith(".") else match[1]
    is_there = name in keys or any(other.startswith(name + ".") for other in keys)
    if is_there or match.re is _RELATIVE:
        return "${" + name + "}"
    return None if match[2] is None else _reference(key, yaml_value(match[2].strip()), keys)


def _names_a_table(value: object, values: Values) -> bool:
    """Whether the value is a reference to a whole table, whose settings are in the file."""
    name = value[2:-1] if isinstance(value, str) and value.startswith("${") else ""
    return bool(name) and any(key.startswith(name + ".") for key in values)


def _left_out(values: Values, settings: Values) -> dict[str, Any]:
    """verl's defaults on which a complete experiment relies; `values` have those of its program, too."""
    if "actor_rollout_ref.model.path" not in values:
        return {}
    mode = mode_of(values)
    asynchronous = V1[mode] | {THRESHOLD: DEFAULT_THRESHOLD} if mode in V1 else {}
    critic = {**_WITH_A_CRITIC, "critic.ppo_mini_batch_size": values.get(_MINI, 256)}
    defaults = _ALWAYS | asynchronous | (critic if has_critic(_ALWAYS | dict(values)) else {}) | dict(values)
    return {key: value for key, value in defaults.items() if key not in settings}


_VERL = System(
    keys=KEYS,
    dependent=(ASYNCHRONOUS | CRITIC, OF_V1 | REWARDS | OBJECTIVE | LAYOUT | DISTILLATION),
    switches=SWITCHES,
    unknown=lambda key, writing: "not known to this converter, which covers the settings of verl up to 0.9.1",
    implied=layout,
    other_defaults=other_folder(
        "trainer.default_local_dir",
        "checkpoints/{trainer.project_name=verl_examples}/{trainer.experiment_name=gsm8k}",
        "trainer.ckpt_path",
        model="actor_rollout_ref.model.path",
    ),
)
