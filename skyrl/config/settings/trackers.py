"""Supported trackers, keyed by their name in `trainer.logger`, and what each of them needs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from skyrl.config.foundation.import_paths import is_import_path
from skyrl.errors import ConfigError, Problem
from skyrl.installation import install_command
from skyrl.tree.names import nearest


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
    if facts.key and mode not in ("offline", "local", "disabled") and not _has_key(facts, environ):
        yield f"{name} needs a key, but none is set", f"set the variable {facts.key}, or run `{name} login`"


def is_installed(package: str) -> bool:
    """Whether the package can be imported. A folder of that name without code, as W&B leaves beside a run, does not
    count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _has_key(facts: TrackerFacts, environ: Mapping[str, str]) -> bool:
    home = Path(environ.get("HOME", "/"))
    return bool(environ.get(facts.key)) or any((home / file).is_file() for file in facts.logins)
