"""Supported trackers, keyed by their name in `trainer.logger`: what each of them needs, and their settings.

Keys of services come from the environment (`WANDB_API_KEY`, `SWANLAB_API_KEY`) or the services' own logins, never from
a configuration, which is stored.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.errors import ConfigError, Problem
from skyrl.installation import install_command
from skyrl.tree import FREE, field, frozen
from skyrl.tree.names import nearest
from skyrl.tree.types import Seconds
from skyrl.tree.validators import http_address, non_negative, text_like


@attrs.frozen(kw_only=True)
class TrackerFacts:
    """Facts about a tracker."""

    tracker_class: str
    """Import path of its class, which has a constructor `of_run`. It is imported only by a run that names the tracker.
    """

    package: str = ""
    """Package that the tracker imports and the `train` extra does not install; `extra` names the extra that does."""

    extra: str = ""

    in_run: bool = False
    """True: it is called in the run's own process (`Tracker` of `skyrl/tracking/tracker.py`). False: it is a service
    (`skyrl/tracking/services/service.py`), which a separate process feeds from the run's folder."""

    key: str = ""
    """Environment variable with the service's key; empty if it needs none."""

    logins: tuple[str, ...] = ()
    """Files below the home folder in which the service's own login leaves a key."""


TRACKERS: Mapping[str, TrackerFacts] = {
    "console": TrackerFacts(tracker_class="skyrl.tracking.console:Console", in_run=True),
    "wandb": TrackerFacts(
        tracker_class="skyrl.tracking.services.wandb_run:WandbRun",
        package="wandb",
        extra="wandb",
        key="WANDB_API_KEY",
        logins=(".netrc", ".config/wandb/.netrc"),
    ),
    "tensorboard": TrackerFacts(
        tracker_class="skyrl.tracking.services.tensorboard_events:TensorBoardEvents",
        package="tensorboard",
        extra="tensorboard",
    ),
    "mlflow": TrackerFacts(
        tracker_class="skyrl.tracking.services.mlflow_run:MlflowRun", package="mlflow", extra="mlflow"
    ),
    "swanlab": TrackerFacts(
        tracker_class="skyrl.tracking.services.swanlab_run:SwanLabRun",
        package="swanlab",
        extra="swanlab",
        key="SWANLAB_API_KEY",
        logins=(".swanlab/.netrc",),
    ),
}
"""Facts about each tracker, keyed by its name."""


def names_of(trackers: str | Sequence[str]) -> tuple[str, ...]:
    """The names in `logger`: one, or several."""
    return (trackers,) if isinstance(trackers, str) else tuple(trackers)


def known_trackers(_: object, attribute: attrs.Attribute[str], value: str | Sequence[str]) -> None:
    """Validator of names of trackers. Raises `ConfigError` for one that is neither in `TRACKERS` nor an import path."""
    for name in names_of(value):
        if name not in TRACKERS and not is_import_path(name):
            near = nearest(name, tuple(TRACKERS))
            hint = f"did you mean {near}?" if near else "one of your own has the form module:name or file.py:name"
            message = f"{name!r} is not one of: {', '.join(TRACKERS)}"
            raise ConfigError([Problem(path=attribute.name, message=message, hint=hint)])


def lacks_of(
    name: str, *, mode: str | None, environ: Mapping[str, str] = os.environ, elsewhere: bool = False
) -> Iterator[tuple[str, str]]:
    """(what a tracker lacks on this machine, what to do) for its package and its key. `mode` is that of its settings: a
    service that stays offline needs no key. `elsewhere`: another interpreter has the package.
    """
    facts = TRACKERS[name]
    if facts.package and not elsewhere and not is_installed(facts.package):
        yield f"the package {facts.package} is not installed", install_command(facts.extra)
    mode = mode or environ.get(f"{name.upper()}_MODE") or "online"
    home = Path(environ.get("HOME", "/"))
    has_key = bool(environ.get(facts.key)) or any((home / file).is_file() for file in facts.logins)
    if facts.key and mode not in ("offline", "local", "disabled") and not has_key:
        yield f"{name} needs a key, but none is set", f"set the variable {facts.key}, or run `{name} login`"


def is_installed(package: str) -> bool:
    """Whether the package can be imported. A folder of that name without code, as W&B leaves beside a run, does not
    count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


_is_id = text_like(r"^[A-Za-z0-9_-]{1,64}$", "an id: 1 to 64 letters, digits, - and _")


@frozen
class WandbConfig(BaseConfig):
    """Weights & Biases, read where `logger` names `wandb`."""

    entity: str | None = field(default=None, metadata=FREE)
    """Team or user that the run belongs to. None: the default of the account."""

    mode: Literal["online", "offline"] | None = field(default=None, metadata=FREE)
    """online: sent during the run; offline: kept in the run's folder, for `wandb sync`. None: the variable WANDB_MODE,
    online without it."""

    id: str | None = field(default=None, validator=_is_id, metadata=FREE)
    """Id of the run. None: one is made when the run first starts; resumed runs keep it either way."""

    base_url: str | None = field(default=None, validator=http_address, metadata=FREE)
    """Address of a self-hosted server. None: the variable WANDB_BASE_URL, the public service without it."""


@frozen
class SwanLabConfig(BaseConfig):
    """SwanLab, read where `logger` names `swanlab`."""

    workspace: str | None = field(default=None, metadata=FREE)
    """Workspace that the run belongs to. None: that of the account."""

    mode: Literal["online", "offline"] | None = field(default=None, metadata=FREE)
    """online: sent during the run; offline: kept below `path`, for `swanlab sync`. None: the variable SWANLAB_MODE,
    online without it."""

    id: str | None = field(default=None, validator=_is_id, metadata=FREE)
    """Id of the run. None: one is made when the run first starts; resumed runs keep it either way."""

    path: str | None = field(default=None, metadata=FREE)
    """Folder of its local files. None: `swanlog` in the run's folder."""


@frozen
class MlflowConfig(BaseConfig):
    """MLflow, read where `logger` names `mlflow`."""

    tracking_uri: str | None = field(default=None, metadata=FREE)
    """Address of a tracking server, or `sqlite:///FILE`. None: the variable MLFLOW_TRACKING_URI; without it the file
    `mlflow.db` beside the run's folder, which runs there share."""


@frozen
class TensorBoardConfig(BaseConfig):
    """TensorBoard, read where `logger` names `tensorboard`."""

    path: str | None = field(default=None, metadata=FREE)
    """Folder of the event files, one for each run. None: `tensorboard` in the run's folder."""


@frozen
class TrackersConfig(BaseConfig):
    """Content and places of trackers other than the console; see docs/tracking.md."""

    tags: tuple[str, ...] = field(default=(), metadata=FREE)
    """Labels to find the run by."""

    notes: str | None = field(default=None, metadata=FREE)
    """Text about the run, for people to read."""

    group: str | None = field(default=None, metadata=FREE)
    """Name that runs of one experiment share, such as its seeds."""

    job_type: str | None = field(default=None, metadata=FREE)
    """Name of the run's part in its group, such as `train`."""

    sample_rows: int = field(default=8, validator=non_negative, metadata=FREE)
    """Sampled answers of each step, and evaluated ones of each data source, that are shown in tables. 0: none."""

    finish_seconds: Seconds = field(default=30.0, validator=non_negative, metadata=FREE)
    """Longest wait at the end of a run for trackers to catch up; `skyrl track` delivers the rest."""

    python: str | None = field(default=None, metadata=FREE)
    """Python interpreter that trackers run in, for a package that does not install beside the others: one with
    `skyrl-attrs[mlflow]`, for example. None: that of the run."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""

    swanlab: SwanLabConfig = SwanLabConfig()
    """SwanLab."""

    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """TensorBoard."""
