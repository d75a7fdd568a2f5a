"""Reinforcement-learning post-training of language models, driven by a configuration that can be trusted.

    run = skyrl.train("run.toml", trainer__max_training_steps=20)
    run.metrics, run.samples(), run.model(), run.report()

`skyrl.config` defines the fields of a run's configuration, `skyrl.training` is the loop, and `skyrl.experiments`
assembles a run. Importing this package imports none of them: each name below is imported when it is first used. A
sandbox sees this file and few others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl.api.run import Run, load, train
    from skyrl.api.sampling import evaluate, generate
    from skyrl.installation import __version__
    from skyrl.training.callbacks import Callback, Control, TrainingState

__all__ = [
    "Callback",
    "Control",
    "Run",
    "TrainingState",
    "__version__",
    "evaluate",
    "generate",
    "load",
    "train",
]

_PLACES = {
    "Callback": "skyrl.training.callbacks",
    "Control": "skyrl.training.callbacks",
    "Run": "skyrl.api.run",
    "TrainingState": "skyrl.training.callbacks",
    "__version__": "skyrl.installation",
    "evaluate": "skyrl.api.sampling",
    "generate": "skyrl.api.sampling",
    "load": "skyrl.api.run",
    "train": "skyrl.api.run",
}
"""Name -> module that it is imported from on first use."""


if not TYPE_CHECKING:  # a type checker would take any name for one of the module

    def __getattr__(name: str) -> object:
        """The public name, imported now. Raises `AttributeError` for any other."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_PLACES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
