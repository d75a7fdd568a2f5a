"""`skyrl.train`: trains a model in this process, as `skyrl run` does."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.api.brief_errors import brief_errors
from skyrl.api.run import Run
from skyrl.api.source import Config, Source, source_of
from skyrl.config.derive.run_kind import RunKind
from skyrl.processes.torch_environment import set_torch_environment
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
    source = source_of(config, overrides)
    return trained(Source(files=source.files, assignments=source.assignments, callbacks=tuple(callbacks)))


def trained(source: Source) -> Run:
    """Train the run of a source, again after failures that its configuration allows. Raises as `train` does."""
    composed = source.composed(RunKind.preflight_checks)
    set_torch_environment()
    from skyrl.experiments.experiment import experiment_class
    from skyrl.runs.inputs import notice
    from skyrl.runs.recovery import attempts
    from skyrl.runs.session import RunSession

    make, is_trained = experiment_class(composed.config), False
    for attempt in attempts(composed.config):
        experiment = make(attempt.run)
        experiment.is_another_try, experiment.places = attempt.is_another_try, composed.places
        experiment.more_callbacks = source.callbacks
        with attempt:
            is_trained = RunSession(experiment).run()
    if not is_trained:
        notice(f"The run in {experiment.folder.path} is already finished: nothing was trained.")
    return Run(experiment.folder.path, source)
