"""Converts AReaL's machine settings (launchers, schedulers, placement, names) to a description of the cluster, and its
`stats_logger` to our trackers.

In AReaL, each role has separate cores, memory, container and variables. Here, one job contains all processes of a run:
it requests the resources of the most demanding role, and contradictory roles are refused. The settings of all services
of `stats_logger` together determine `logger`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from skyrl.interop.translation import (
    Entry,
    Translation,
    UnexpectedValue,
    Values,
    redundant,
    refused,
    translate,
    unsupported,
)
from skyrl.tree.types import display_value

_VARIABLE = "variables."
_CONTAINER = "slurm.container."
_SPEC = re.compile(r"(?P<spec>[^\[]+\.scheduling_spec\[\d+\])(?:\.(?P<name>.+))?")
_MEBIBYTES = re.compile(r"(launcher\.\w+_mem_per_gpu|mem_per_(model_worker|generation_server))")
_CORES = re.compile(r"(launcher\.\w+_cpus_per_gpu|cpus_per_(model_worker|generation_server))")
_FOUND_THROUGH_RAY = "processes of a run find each other through Ray; for names of other services see docs/services.md"
_COMMANDS = {"local": "skyrl launch local", "ray": "skyrl launch ray", "slurm": "skyrl launch slurm"}

LINES_OF_BASH = ".additional_bash_cmds"
"""Suffix of the keys whose values a shell evaluates, in AReaL and here."""


def without_own_folder(key: str, value: object) -> Any:
    """Options of srun without the redundant `--chdir $PWD`: a job runs in the folder from which it is submitted."""
    if key.endswith("srun_additional_args") and isinstance(value, str):
        return re.sub(r"--chdir[= ]\$PWD", "", value).strip()
    return value


def machines(key: str, value: object, values: Values) -> Translation | None:
    """Convert a machine setting; None for any other setting."""
    if key in ("mode", "scheduler.type"):
        return _launcher(value)
    if key.startswith("cluster.name_resolve."):
        return _names(key.rpartition(".")[2], value, values)
    if key.startswith("scheduler."):
        return _service(key.rpartition(".")[2], value)
    if key == "ray_temp_path":
        if not value:
            return redundant("Ray's default is used")
        return Translation(cluster={_VARIABLE + "RAY_TMPDIR": str(value)})
    if value is not None and _CORES.fullmatch(key):
        return Translation(cluster={"slurm.cpus_per_gpu": value})
    if value is not None and _MEBIBYTES.fullmatch(key):
        return Translation(cluster={"slurm.memory_per_gpu": f"{value}MiB"})
    if key.startswith(("cpus_per_", "mem_per_")):
        return redundant(
            "the trainer's process does this itself: there is no separate process to give cores or memory to"
        )
    if key.startswith("launcher."):
        return _convert_launcher(key, value, values)
    if spec := _SPEC.fullmatch(key):
        return _convert_spec(spec["spec"], spec["name"] or "", value, values)
    if not key.endswith(".scheduling_spec"):
        return None
    if isinstance(value, str) and "scheduling_spec" in value:  # a reference: `${actor.scheduling_spec}`
        return redundant("set by actor.scheduling_spec: all processes run in one job")
    return redundant("not set") if not value else refused("expected a list of tables")


def _launcher(value: object) -> Translation:
    """Convert AReaL's launchers, and the schedulers of its newer versions, which are commands here."""
    if value is None:
        return redundant("not set: the command that starts the run decides")
    command = _COMMANDS.get(str(value))
    return Translation(command=command) if command else unsupported(f"launchers other than {', '.join(_COMMANDS)}")


def _convert_launcher(key: str, value: object, values: Values) -> Translation | None:
    """Convert a setting of the tables `launcher` and `launcher.slurm` of 2025."""
    name = key.rpartition(".")[2]
    if value in (None, "", {}):
        return redundant("not set")
    if name.endswith("_env_vars"):
        return _variables(value)
    if name in ("trainer_image", "inference_server_image"):
        return _image(value, values.get("launcher.slurm.container_type", "apptainer"))
    if name in ("container_type", "mount"):
        images = [values.get(f"launcher.slurm.{role}_image") for role in ("trainer", "inference_server")]
        return _container(name, value, any(images), values.get("launcher.slurm.container_type", "apptainer"))
    return _srun(value) if name == "srun_additional_args" else None


def _convert_spec(spec: str, name: str, value: object, values: Values) -> Translation | None:
    """Convert one setting of a role's processes, in the form used since 2026."""
    if name == "env_vars" or name.startswith("env_vars."):
        return _variables({name.removeprefix("env_vars."): value} if "." in name else value)
    kind = values.get(f"{spec}.container_type", "apptainer")
    if name == "image":
        return _image(value, kind)
    if name in ("container_type", "mount"):
        return _container(name, value, bool(values.get(f"{spec}.image")), kind)
    entry = _OF_A_SPEC.get(name)
    if entry is None:
        return None
    return redundant("not set") if value is None else translate(entry, value)


def _variables(value: object) -> Translation:
    """Convert environment variables, a table or `A=1,B=2`. All processes of a run share one environment here."""
    pairs = value.items() if isinstance(value, Mapping) else _pairs(str(value or ""))
    cluster = {_VARIABLE + str(name): str(text) for name, text in pairs if not str(name).startswith("AREAL_")}
    if cluster:
        return Translation(cluster=cluster)
    return redundant("read only by AReaL" if value else "no variables")


def _pairs(text: str) -> list[tuple[str, str]]:
    """Names and values of `A=1,B=2`; everything after the first `=` is the value."""
    return [(name.strip(), item) for name, _, item in (part.partition("=") for part in text.split(",") if part.strip())]


def _image(value: object, kind: object) -> Translation:
    if not value or kind == "none":
        return redundant("no container is used")
    note = "skyrl must be installed in the image"
    return Translation(cluster={_CONTAINER + "type": kind, _CONTAINER + "image": value}, note=note)


def _container(name: str, value: object, has_image: bool, kind: object) -> Translation:
    """Convert the kind and the mounts of a container, which have no effect without an image from the user."""
    if not has_image or kind == "none":
        return redundant("no container is used: processes run directly on the nodes")
    if name == "container_type":
        return Translation(cluster={_CONTAINER + "type": value})
    mounts = [part.strip() for part in str(value).split(",") if part.strip()]
    return Translation(cluster={_CONTAINER + "mounts": mounts})


def _srun(value: object) -> Translation:
    """Convert options of srun, each to one word."""
    try:
        words = shlex.split(str(value))
    except ValueError as error:
        return refused(f"invalid options: {error}")
    options: list[str] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append(word)
        else:  # the value of the preceding option
            options[-1] += f"={word}"
    return Translation(cluster={"slurm.srun_options": options}) if options else redundant("no options")


def _prologue(value: object) -> Translation:
    if not isinstance(value, list | None):
        raise UnexpectedValue("expected a list of commands")
    return Translation(cluster={"prologue": value}) if value else redundant("no commands")


def _option(name: str, value: object) -> Translation:
    if not value:
        return redundant("any nodes")
    return Translation(cluster={"slurm.sbatch_options": [name if value is True else f"{name}={value}"]})


def _command(value: object) -> Translation:
    if "areal" in str(value):
        return redundant("skyrl starts its own processes")
    return unsupported("a custom command for each rank")


_OF_A_SPEC: dict[str, Entry] = {
    "gpu": redundant("GPUs of ranks and engines are derived from the backends"),
    "port_count": redundant("free ports are chosen when a process starts"),
    "task_type": redundant("all processes run in one job"),
    "ray_placement_strategy": redundant("Ray placement groups are derived from trainer.placement"),
    "cpu": lambda value: Translation(cluster={"slurm.cpus_per_gpu": value}),
    "mem": lambda value: Translation(cluster={"slurm.memory_per_gpu": f"{value}GiB"}),
    **{name: partial(_option, f"--{name}") for name in ("nodelist", "exclude", "exclusive", "reservation")},
    "cmd": _command,
    "srun_additional_args": _srun,
    "additional_bash_cmds": _prologue,
}
"""Settings of `scheduling_spec` that do not depend on others."""


def _names(name: str, value: object, values: Values) -> Translation:
    """Convert the place where services publish their addresses: the variable SKYRL_NAMES, which runs do not need."""
    kind = str(values.get("cluster.name_resolve.type", "nfs"))
    setting, store = {"nfs": ("nfs_record_root", "nfs:"), "etcd3": ("etcd3_addr", "etcd:")}.get(kind, ("", ""))
    if name == "type":
        is_placed = bool(values.get(f"cluster.name_resolve.{setting}"))
        return redundant(f"set by cluster.name_resolve.{setting}" if is_placed else _FOUND_THROUGH_RAY)
    if name != setting or not value:
        return redundant(_FOUND_THROUGH_RAY if kind == "ray" else f"no effect: names are stored in {kind}")
    names = {_VARIABLE + "SKYRL_NAMES": f"{store}{value}"}
    return Translation(cluster=names, note="used by services: see docs/services.md")


def _service(name: str, value: object) -> Translation | None:
    """Convert settings of services on other machines that rewards need. AReaL of 2025 had them, but never read them."""
    if value in (None, "", {}):
        return redundant("not set")
    table = "environment.skyrl_gym."
    if name == "functioncall_service_domain":
        address = str(value) if "://" in str(value) else f"http://{value}"
        note = "skyrl serve-code provides this service: see docs/services.md"
        return Translation(writes={table + "code_url": f"{address.rstrip('/')}/run"}, note=note)
    if name == "reward_model_service_url":
        note = "skyrl serve-reward provides this service: see docs/services.md"
        return Translation(writes={table + "reward_model.url": value}, note=note)
    if name == "reward_model_path":
        return Translation(writes={table + "reward_model.path": value})
    if name == "deploy_mode":
        return redundant("whether engines have separate GPUs is derived from the backends")
    return redundant("AReaL never reads it") if name == "endpoint" else None


_PLACES = ("stats_logger.", "")
"""Prefixes of the services' tables; AReaL's older system has them at the top level."""

_ONLINE = {"wandb": {"online": "online", "shared": "online"}, "swanlab": {"cloud": "online"}}
_KEEPING = {"wandb": (), "swanlab": ("local",)}
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
    modes = {service: values.get(f"{prefix}{service}.mode") for service in _ONLINE}
    services = [other for other, mode in modes.items() if mode in (_OFFLINE, *_ONLINE[other], *_KEEPING[other])]
    services += ["tensorboard"] * bool(values.get(f"{prefix}tensorboard.path"))
    if (service, name) in (("wandb", "mode"), ("swanlab", "mode"), ("tensorboard", "path")):
        return _choice(service, value, services, ours)
    if service not in services:
        return redundant(f"{service} is off")
    return _tracker_setting(service, name, value, values, ours)


def _choice(service: str, value: object, services: list[str], ours: str) -> Translation:
    """Convert a service's mode, or TensorBoard's folder, which turns the service on or off."""
    if service == "swanlab" and service not in services and value not in (None, "disabled"):
        return unsupported(f"SwanLab mode {display_value(value)}; offline stores its files")
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


def _tracker_setting(service: str, name: str, value: object, values: Values, ours: str) -> Translation:
    """Convert a setting of a service that is turned on."""
    if value in (None, "", [], {}):
        return redundant("not set")
    if name in _TRACKER_NAMES:  # here one name is for all services
        source, path = _TRACKER_NAMES[name]
        of_all = values.get(source)
        if of_all in (None, "", value):
            return Translation(writes={ours + path: value})
        return unsupported(f"a separate name for one tracker; {ours}{path} = {display_value(of_all)} applies to all")
    if name in ("wandb_api_key", "api_key"):
        return refused(f"configurations store no API keys: set the environment variable {service.upper()}_API_KEY")
    if name == "id_suffix":
        return redundant("a run's ID is stored in its folder (trackers.wandb.id sets another)")
    setting = _TRACKER_SETTINGS.get((service, name))
    if setting is None:
        return unsupported("tracker settings beyond those in docs/tracking.md")
    return Translation(writes={f"{ours}trackers.{setting}": value})


_TRACKER_NAMES = {"project": ("experiment_name", "project_name"), "name": ("trial_name", "run_name")}
"""Setting of a service -> the general setting that it overrides, and our path."""

_TRACKER_SETTINGS = {
    ("wandb", "entity"): "wandb.entity",
    ("wandb", "wandb_base_url"): "wandb.base_url",
    ("wandb", "job_type"): "job_type",
    ("wandb", "group"): "group",
    ("wandb", "notes"): "notes",
    ("wandb", "tags"): "tags",
    ("swanlab", "logdir"): "swanlab.path",
}
"""(service, setting) -> our path below `trackers`."""
