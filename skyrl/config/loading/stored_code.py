"""Finds code that only a stored configuration names, and that no file or argument of the user names as well.

A checkpoint may come from somewhere else, and following an import path means running what it names.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.errors import Problem
from skyrl.tree import get_at
from skyrl.tree.origins import Origins, place_of

IMPORTED = (
    "environment.env_class",
    "environment.skyrl_gym.mcp.reward",
    "environment.agent.function",
    "trainer.fully_async.accept",
    "data.curriculum.sampler",
    "trainer.algorithm.advantage_estimator",
    "trainer.algorithm.policy_loss_type",
    "trainer.callbacks",
    "trainer.logger",
    "curriculum.sampler",
    "loss_type",
    "callbacks",
    "logger",
)
"""Fields whose import path is followed when a run starts: of reinforcement learning, then of supervised runs."""

_COMMAND = "environment.agent.command"
_SERVERS = "environment.skyrl_gym.mcp.servers"
_ENGINE = "generator.inference_engine.engine_init_kwargs"
_CLUSTERS = ("trainer.placement.ray_address", "placement.ray_address")


def code_that_is_only_stored(run: RunConfig, origins: Origins) -> Iterator[Problem]:
    """Import paths and other code that would run when the run starts, and that only a stored configuration names."""
    for path, value, danger in named_code(run):
        if any(chain[-1].is_stored for known, chain in origins.items() if f"{known}.".startswith(f"{path}.")):
            words = value if isinstance(value, str) else json.dumps(value)
            yield Problem(
                path=path,
                message=f"{words} is code that only the stored run names, and that runs only if you name it, too: "
                f"{danger}",
                hint=f"if you trust it, pass --trust, or name it in this command, too: {path}={shlex.quote(words)}",
                location=place_of(path, origins),
            )


def named_code(run: RunConfig) -> Iterator[tuple[str, Any, str]]:
    """Path, value and danger of each place of the tree that names code."""
    for path in IMPORTED:
        value = value_at(run, path)
        if imported_by(value):
            yield path, value, "reading it runs it"
    if command := value_at(run, _COMMAND):
        yield _COMMAND, list(command), "it is a program that would be started"
    for server in value_at(run, _SERVERS) or ():
        if server.command:
            yield _SERVERS, list(server.command), "it is a program that would be started"
    for name, value in (value_at(run, _ENGINE) or {}).items():
        yield f"{_ENGINE}.{name}", value, "the engine may run code for it"
    for path in _CLUSTERS:
        if value := value_at(run, path):
            yield path, value, "a Ray cluster hands over pickles, which run code"


def imported_by(value: object) -> list[str]:
    """The import paths in the value of such a field: one name, or a list of names."""
    names = value if isinstance(value, tuple) else (value,)
    return [name for name in names if isinstance(name, str) and is_import_path(name)]


def value_at(run: RunConfig, path: str) -> Any:
    """The value of a field; None for a path that this kind of run does not have."""
    try:
        return get_at(run, path)
    except AttributeError:
        return None
