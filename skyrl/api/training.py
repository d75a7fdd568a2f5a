"""`skyrl.train`: trains a model in this process, as `skyrl run` does."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from skyrl.api.brief_errors import brief_errors
from skyrl.api.commands import trained
from skyrl.api.run import Run
from skyrl.api.source import Config, source_of
from skyrl.training.callbacks import Callback


@brief_errors
def train(config: Config, *, callbacks: Sequence[Callback] = (), **overrides: object) -> Run:
    """Train a model as configured, to the end, and return the run.

    An unfinished run in the same folder is continued from its last checkpoint; a finished one is returned as it is.
    Works under a running event loop, such as a notebook's.

    Args:
        config: A file (TOML, YAML or JSON), the folder of a run, or `preset:NAME`; a list of these, of which later ones
            win; a mapping of dotted paths to values; or a tree, such as `SkyRLTrainConfig` or the result of `compose`.
        callbacks: Objects that hear the events of the loop, besides those that the configuration names.
        overrides: Values of fields, with two underscores for each dot: `trainer__max_training_steps=20`. Fields that
            name code also take a function or class: `environment__env_class=my_reward`.

    Returns:
        The run, whose folder holds metrics, samples, checkpoints and the trained model.

    Raises:
        UserError: Configuration, data, model or folder cannot be used; nothing was started. `ConfigError` lists every
            problem of the configuration.
        RunError: The run cannot continue; what was saved stays.
        Stopped: A signal or the deadline ended the run early.

    Example:
        run = skyrl.train("run.toml", trainer__run_path="runs/short", trainer__max_training_steps=20)
    """
    source = attrs.evolve(source_of(config, overrides), callbacks=tuple(callbacks))
    return Run(trained(source), source)
