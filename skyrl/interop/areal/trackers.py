"""Converts AReaL's `stats_logger` to our trackers; the settings of all its services together determine `logger`."""

from __future__ import annotations

from typing import Any

from skyrl.interop.translation import Translation, Values, redundant, refused, unsupported

_PLACES = ("stats_logger.", "")
"""Prefixes of the services' tables; AReaL's older system has them at the top level."""

_ONLINE = {"wandb": {"online": "online", "shared": "online"}, "swanlab": {"cloud": "online"}}
_KEPT = {"wandb": (), "swanlab": ("local",)}
"""Modes that keep files on the machine, beside offline, which does so here."""

_OFFLINE = "offline"
_ONE_WRITER = "only one process writes to W&B, so shared mode is not needed"


def tracker(key: str, value: object, values: Values, ours: str) -> Translation | None:
    """Convert a setting of W&B, SwanLab or TensorBoard; None for any other setting.

    `ours` is the path of the table that contains `logger`, ending in a dot; empty for the top level.
    """
    prefix = next((prefix for prefix in _PLACES if key.startswith(prefix)), "")
    service, _, name = key.removeprefix(prefix).partition(".")
    if service not in ("wandb", "swanlab", "tensorboard") or not name:
        return None
    services = _enabled_services(prefix, values)
    if (service, name) in (("wandb", "mode"), ("swanlab", "mode"), ("tensorboard", "path")):
        return _choice(service, value, services, ours)
    if service not in services:
        return redundant(f"{service} is off")
    return _setting(service, name, value, values, ours)


def _enabled_services(prefix: str, values: Values) -> list[str]:
    """The services that the file turns on."""
    modes = {service: values.get(f"{prefix}{service}.mode") for service in _ONLINE}
    services = [service for service, mode in modes.items() if mode in (_OFFLINE, *_ONLINE[service], *_KEPT[service])]
    return services + ["tensorboard"] * bool(values.get(f"{prefix}tensorboard.path"))


def _choice(service: str, value: object, services: list[str], ours: str) -> Translation:
    """Convert a service's mode, or TensorBoard's folder, which turns the service on or off."""
    if service == "swanlab" and service not in services and value not in (None, "disabled"):
        return unsupported(f"SwanLab mode {value!r}; offline stores its files")
    if service not in services:
        if services or not ours or service != "wandb":
            return redundant(f"{service} is off")
        return Translation(writes={f"{ours}logger": "console"})  # no service is asked for, but W&B is our default
    writes: dict[str, Any] = {f"{ours}logger": ["console", *services]}
    if service == "tensorboard":
        return Translation(writes=writes | {f"{ours}trackers.tensorboard.path": value})
    mode = _ONLINE[service].get(str(value), _OFFLINE)
    note = {"shared": _ONE_WRITER, "local": "its files are files that can be synced"}.get(str(value), "")
    return Translation(writes=writes | {f"{ours}trackers.{service}.mode": mode}, note=note)


def _setting(service: str, name: str, value: object, values: Values, ours: str) -> Translation:
    """Convert a setting of a service that is turned on."""
    if value in (None, "", [], {}):
        return redundant("not set")
    if name in _NAMES:
        source, path = _NAMES[name]
        return _name(value, values.get(source), f"{ours}{path}")
    if name in ("wandb_api_key", "api_key"):
        return refused(f"configurations store no API keys: set the environment variable {service.upper()}_API_KEY")
    if name == "id_suffix":
        return redundant("a run's ID is stored in its folder (trackers.wandb.id sets another)")
    setting = _SETTINGS.get((service, name))
    if setting is None:
        return unsupported("tracker settings beyond those in docs/tracking.md")
    return Translation(writes={f"{ours}trackers.{setting}": value})


def _name(value: object, of_all: object, path: str) -> Translation:
    """Convert a name that AReaL has for one service; here one name is for all services."""
    if of_all in (None, "", value):
        return Translation(writes={path: value})
    return unsupported(f"a separate name for one tracker; {path} = {of_all!r} applies to all")


_NAMES = {"project": ("experiment_name", "project_name"), "name": ("trial_name", "run_name")}
"""Setting of a service -> the general setting that it overrides, and our path."""

_SETTINGS = {
    ("wandb", "entity"): "wandb.entity",
    ("wandb", "wandb_base_url"): "wandb.base_url",
    ("wandb", "job_type"): "job_type",
    ("wandb", "group"): "group",
    ("wandb", "notes"): "notes",
    ("wandb", "tags"): "tags",
    ("swanlab", "logdir"): "swanlab.path",
}
"""(service, setting) -> our path below `trackers`."""
