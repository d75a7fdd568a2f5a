"""Sources of a run in Python: files, a mapping or a tree, and the values that replace some of theirs.

Training, evaluating and sampling from a source is what the public functions have in common with the methods of a run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeAlias, TypeVar

import attrs

from skyrl.config.derive.run_kind import RunKind
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.load import Composed, compose
from skyrl.config.loading.resolve import derived
from skyrl.errors import Problem, SkyRLError, Stopped, UserError, render
from skyrl.processes.torch_environment import set_torch_environment
from skyrl.runs.inputs import notice
from skyrl.runs.run_tree import AnyRun
from skyrl.runs.stored_runs import place_of, stored_run
from skyrl.tools.sampling_alone import prepared
from skyrl.tools.sampling_target import Target, find_target
from skyrl.tree.sparse import sparse

if TYPE_CHECKING:
    from skyrl.experiments.standalone import StandaloneSampling
    from skyrl.training.callbacks import Callback
    from skyrl.tree.rules import Check

P = ParamSpec("P")
R = TypeVar("R")

Config: TypeAlias = (
    str | PathLike[str] | Sequence[str | PathLike[str]] | Mapping[str, object] | RunConfig | Composed[Any]
)
"""A file, the folder of a run or `preset:NAME`; several of them; dotted paths and values; or a tree."""


@attrs.frozen(kw_only=True)
class Source:
    """Files and assignments, later ones winning, and the callbacks that the caller gave as objects."""

    files: tuple[str, ...] = ()
    assignments: tuple[tuple[str, object], ...] = ()
    callbacks: tuple[Callback, ...] = ()

    def with_assignments(self, changes: Mapping[str, object]) -> Self:
        """The same with more assignments. A keyword has two underscores for each dot of a path."""
        more = tuple((name.replace("__", "."), value) for name, value in changes.items())
        return attrs.evolve(self, assignments=(*self.assignments, *more))

    def composed(self, also: Callable[[RunKind], Sequence[Check[Any]]]) -> Composed[AnyRun]:
        """The run, resolved and checked, also by the checks of this machine. Warnings are printed.

        Raises `ConfigError` with every problem.
        """
        composed: Composed[AnyRun] = compose(self.files, self.assignments, also=also, environ=os.environ)
        warn(composed.warnings)
        return composed


def source_of(config: Config, overrides: Mapping[str, object]) -> Source:
    """The source that `config` describes, with `overrides` on top. Raises `UserError` for anything else."""
    match config:
        case str() | PathLike():
            source = Source(files=(fspath(config),))
        case Composed(written=written):
            source = Source(assignments=tuple(sparse(written).items()))
        case RunConfig():
            source = Source(assignments=tuple(sparse(config, leave_out=derived(config)).items()))
        case Mapping():
            source = Source(assignments=tuple((str(path), value) for path, value in config.items()))
        case [*files] if all(isinstance(item, str | PathLike) for item in files):
            source = Source(files=tuple(fspath(file) for file in files))
        case _:
            raise UserError(
                f"{config!r:.80} is no configuration: give a file, the folder of a run, preset:NAME, a list of these, "
                "a mapping of dotted paths to values, or a tree such as SkyRLTrainConfig"
            )
    return source.with_assignments(overrides)


def warn(problems: Sequence[Problem]) -> None:
    """Print warnings."""
    if problems:
        notice(render(problems, "Warnings"))


def source_of_folder(folder: Path) -> Source:
    """The run stored in a folder, which continues there even if the folder was moved. Raises `UserError`, and
    `ConfigError` for one of another version.
    """
    run = stored_run(folder)
    before = {field: run.trainer.folder(field) for field in ("run_path", "ckpt_path", "export_path")}
    if Path(before["run_path"]).expanduser().absolute() == folder:
        return Source(files=(str(folder),))
    moved = tuple((run.trainer.path_of(field), place_of(path, folder, run)) for field, path in before.items())
    return Source(files=(str(folder),), assignments=moved)


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
