"""Converts verl's rewards: `reward.*` of verl 0.9, and the names that its settings had before (reward_loop.py:39)."""

from __future__ import annotations

from typing import Any

from skyrl.interop.translation import (
    ALGORITHM,
    Dependent,
    Translation,
    Values,
    is_off,
    redundant,
    unsupported,
)

_OVERLONG = ("reward_model.reward_kwargs.", "reward.reward_kwargs.")
_FUNCTION = ("custom_reward_function.", "reward.custom_reward_function.")
_MANAGER = ("reward_model.reward_manager", "reward.reward_manager.name")
_SERVED = 'reward models that verl serves; set environment.env_class = "reward_model" (docs/built-in-environments.md)'
_BEFORE = "each sample is scored by its environment as soon as it is complete"


def reward_path(values: Values) -> Any:
    """File of the user's reward function; None if there is none."""
    return _first_set(values, [f"{table}path" for table in _FUNCTION])


def _first_set(values: Values, keys: list[str]) -> Any:
    return next((values[key] for key in keys if not is_off(values.get(key))), None)


def is_overlong_on(values: Values) -> bool:
    """Whether long answers are penalised: only the reward manager `dapo` does so."""
    enabled = _first_set(values, [f"{table}overlong_buffer_cfg.enable" for table in _OVERLONG])
    return bool(enabled) and (_first_set(values, [*_MANAGER]) or "naive") == "dapo"


def _overlong(key: str, value: object, values: Values) -> Translation:
    """Convert DAPO's overlong penalty, which verl's reward manager `dapo` applies."""
    _, _, name = key.partition("reward_kwargs.")
    if not name.startswith("overlong_buffer_cfg.") and name != "max_resp_len":
        return unsupported(f"arguments of a reward manager ({name})")
    if not _first_set(values, [f"{table}overlong_buffer_cfg.enable" for table in _OVERLONG]):
        return redundant("overlong_buffer_cfg.enable is off")
    if not is_overlong_on(values):
        return redundant("no effect: the reward manager is not dapo")
    paths = {"len": "buffer_len", "penalty_factor": "penalty_factor", "max_resp_len": "max_len"}
    if (ours := paths.get(name.rpartition(".")[2])) is None:
        return redundant("set by overlong_buffer_cfg.len")
    return Translation(writes={f"{ALGORITHM}reward_shaping.overlong.{ours}": value})


def _manager(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return redundant("not set")
    if value in ("naive", "dapo"):
        return redundant("each sample is scored by its environment")
    return unsupported(f"reward manager {value!r}")


def _source(key: str, value: object, values: Values) -> Translation:
    if value in (None, "register"):
        return redundant("verl's own reward managers")
    return unsupported("custom reward managers; set environment.env_class to a function")


def _function(key: str, value: object, values: Values) -> Translation:
    path, name = reward_path(values), _first_set(values, [f"{table}name" for table in _FUNCTION])
    if path is None or key.endswith(".name"):
        return redundant("set by custom_reward_function.path" if path else "no custom reward function is set")
    if is_off(value):
        return redundant("not set")
    return Translation(writes={"environment.env_class": f"{path}:{name or 'compute_score'}"})


def _arguments(key: str, value: object, values: Values) -> Translation:
    if is_off(value) or reward_path(values) is None:
        return redundant("no custom reward function is set, or it has no arguments of its own")
    return unsupported("arguments of a reward function in the settings; set them as defaults in its file")


def _model(key: str, value: object, values: Values) -> Translation:
    """Convert a reward model under its older name; its settings are idle while it is off."""
    if is_off(values.get("reward_model.enable")) and key != "reward_model.enable":
        return redundant("reward_model.enable is off")
    if is_off(value):
        return redundant("off")
    if key not in ("reward_model.enable", "reward_model.model.path"):
        return redundant("only used with reward_model.enable, which is not implemented")
    return unsupported(_SERVED)


def _served(key: str, value: object, values: Values) -> Translation:
    if is_off(value):
        return redundant("off")
    if key != "reward.reward_model.enable":
        return redundant("only used with reward.reward_model.enable, which is not converted")
    return unsupported(_SERVED)


def _sandbox(key: str, value: object, values: Values) -> Translation:
    if is_off(value):
        return redundant("not set")
    if reward_path(values) is not None:
        return redundant("no effect: only verl's own rewards use it")
    if not key.endswith(".url"):
        return redundant("limits of the sandbox that runs programs are those of environment.skyrl_gym")
    return unsupported(
        'programs run by Sandbox Fusion; set environment.env_class = "code" (docs/built-in-environments.md)'
    )


def _old_manager(key: str, value: object, values: Values) -> Translation:
    if value is None or not key.endswith("_source"):
        return redundant("not set" if value is None else "set by reward_model.reward_loop_source")
    return _source(key, value, values)


REWARDS: dict[str, Dependent] = {
    **dict.fromkeys([f"{table}{name}" for table in _FUNCTION for name in ("path", "name")], _function),
    **dict.fromkeys([f"{table}reward_kwargs*" for table in _FUNCTION], _arguments),
    **dict.fromkeys(_MANAGER, _manager),
    **dict.fromkeys([f"{table}*" for table in _OVERLONG], _overlong),
    "reward.reward_manager.source": _source,
    "reward_manager.source": _source,
    "reward_model.reward_loop_*": _old_manager,
    "reward_model.num_workers": lambda key, value, values: redundant(_BEFORE),
    "reward.num_workers": lambda key, value, values: redundant(_BEFORE),
    "reward.reward_model.*": _served,
    "reward_model.*": _model,
    "reward.sandbox_fusion.*": _sandbox,
    "sandbox_fusion.*": _sandbox,
}
"""Settings of rewards."""
