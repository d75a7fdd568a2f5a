"""Trains, evaluates and samples from a `Source`: what the public functions have in common with the methods of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from skyrl.api.source import Source, warn
from skyrl.config.derive.run_kind import RunKind
from skyrl.errors import SkyRLError, Stopped
from skyrl.processes.torch_environment import set_torch_environment
from skyrl.runs.inputs import notice
from skyrl.tools.sampling_alone import prepared
from skyrl.tools.sampling_target import Target, find_target

if TYPE_CHECKING:
    from skyrl.experiments.standalone import StandaloneSampling

P = ParamSpec("P")
R = TypeVar("R")


def brief_errors(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose errors raised on purpose begin at its caller, without the frames inside the library, which a
    notebook would print with their code: their messages are complete. Any other exception keeps its traceback.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (SkyRLError, Stopped) as error:
            raise error.with_traceback(None) from None

    return call


def trained(source: Source) -> Path:
    """Train the run of a source, again after failures that its configuration allows. Returns the run's folder. Raises
    as `skyrl.train` does.
    """
    composed = source.composed(RunKind.preflight_checks)
    set_torch_environment()
    from skyrl.experiments.experiment import experiment_class
    from skyrl.runs.recovery import attempts
    from skyrl.runs.session import RunSession

    make, is_trained = experiment_class(composed.config), False
    for attempt in attempts(composed.config):
        experiment = make(attempt.run)
        experiment.is_another_try, experiment.locations = attempt.is_another_try, composed.locations
        experiment.more_callbacks = source.callbacks
        with attempt:
            is_trained = RunSession(experiment).run()
    if not is_trained:
        notice(f"The run in {experiment.folder.path} is already finished: nothing was trained.")
    return experiment.folder.path


def evaluated(model: str, source: Source, step: int | None, to: str | PathLike[str] | None) -> dict[str, Any]:
    """Scores of a model, run or checkpoint, under the configuration of the source or its own. Raises as
    `skyrl.evaluate` does.
    """
    target = find_target(model, step)
    with _prepared(target, source, to, rewarded=True) as (sampling, _):
        from skyrl.tools.evaluating import evaluate

        return evaluate(target, sampling)


def generated(model: str, source: Source, step: int | None, to: str | PathLike[str] | None) -> list[dict[str, Any]]:
    """Answers of a model, run or checkpoint to the prompts of the source. Raises as `skyrl.generate` does."""
    target = find_target(model, step)
    with _prepared(target, source, to, rewarded=False) as (sampling, _):
        from skyrl.tools.generating import ANSWERS, generate

        generate(target, sampling)
        text = (sampling.folder.path / ANSWERS).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def _prepared(
    target: Target, source: Source, to: str | PathLike[str] | None, *, rewarded: bool
) -> AbstractContextManager[tuple[StandaloneSampling, Path]]:
    set_torch_environment()
    return prepared(
        target, source.files, source.assignments, rewarded=rewarded, to=None if to is None else Path(to), warn=warn
    )
