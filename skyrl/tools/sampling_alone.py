"""Prepares a model and a configuration for sampling without training: `skyrl eval` and `skyrl generate`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl.config import SkyRLTrainConfig
from skyrl.config.loading.check import has_effect
from skyrl.config.loading.load import Composed
from skyrl.config.loading.stored import stored_form
from skyrl.errors import Problem, RunError, UserError
from skyrl.hub import HUB_NAME, similar_path_hint
from skyrl.storage.atomic import atomic_folder, is_being_written, refuse_other_files
from skyrl.tools.sampling_target import (
    WITHOUT_ENVIRONMENT,
    Target,
    compose_sampling,
    model_of,
    stored_configuration,
)
from skyrl.tree import evolve_at

if TYPE_CHECKING:
    from skyrl.experiments.standalone import StandaloneSampling

_ALWAYS = ("config.json", "logs", "engines")
_RESULTS = {
    "evaluations": (*_ALWAYS, "results.json", "samples", "sandbox.json"),
    "generations": (*_ALWAYS, "answers.jsonl", "distributions.parquet"),
}
"""What folders of results have in them: one with anything else is not replaced."""


@contextmanager
def prepared(
    target: Target,
    files: Sequence[str],
    overrides: Sequence[str | tuple[str, Any]],
    *,
    rewarded: bool,
    to: Path | None,
    warn: Callable[[Sequence[Problem]], None],
) -> Iterator[tuple[StandaloneSampling, Path]]:
    """Context with the sampling of `target` under a configuration, which is the run's own if `files` is empty, and the
    folder that will have the results.

    Answers are `rewarded` by environments, or only sampled. Results go to `to`, or to a new folder below the run's:
    `RUN/evaluations/step_<n>`, or without rewards `RUN/generations/step_<n>`. They are written beside it, into the
    sampling's own folder, and replace it as a whole when the block ends; only logs outlast an error. Weights of a
    checkpoint are stored there as a model while they are needed. Raises `ConfigError`, `UserError`, `ResumeError`, and
    `RunError` if the folder cannot be created.
    """
    own = stored_configuration(target)
    files = files or own
    if not (files or overrides):
        needed = "a configuration with data and an environment, such as run.toml"
        raise UserError(_missing_configuration(target.name, needed if rewarded else "prompts, with --prompts FILE"))
    overrides = [*overrides, "trainer.eval_before_train=true", *([] if rewarded else WITHOUT_ENVIRONMENT)]
    composed = compose_sampling(files, [*overrides, f"trainer.policy.model.path={target.model}"])
    kind = "evaluations" if rewarded else "generations"
    run_path = target.run or Path(composed.config.trainer.folder("run_path")).expanduser().absolute()
    folder = to or _free_folder(run_path / kind / f"step_{target.step}")
    refuse_other_files(folder, _RESULTS[kind])
    missing_parents = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        with _written_beside(folder) as scratch:
            model = model_of(target, scratch / "model")
            from skyrl.experiments.standalone import StandaloneSampling, preflight

            composed = compose_sampling(
                files,
                [*overrides, f"trainer.policy.model.path={model}"],
                lambda _: preflight(os.environ, rewarded=rewarded),
            )
            warn(composed.warnings if files != own else new_warnings(composed, own))
            stored = stored_form(_sampling_run(composed.config, folder))
            (scratch / "config.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
            yield StandaloneSampling(_sampling_run(composed.config, scratch)), folder
            if target.checkpoint is not None:
                shutil.rmtree(scratch / "model")
    finally:
        with suppress(OSError):  # something was written in one of them
            for parent in missing_parents:
                parent.rmdir()


def new_warnings(composed: Composed[SkyRLTrainConfig], stored: Sequence[str]) -> list[Problem]:
    """The warnings of a configuration that continues the one in the folder `stored`, if there is one, without those
    about values of the stored one that have no effect here: their author wrote them for the run.
    """
    return [
        problem
        for problem in composed.warnings
        if has_effect(composed.config, problem.path) or not problem.location.startswith(tuple(stored))
    ]


@contextmanager
def _written_beside(folder: Path) -> Iterator[Path]:
    """Context with the folder that becomes `folder` at its end. Raises `RunError` if none can be made there."""
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(atomic_folder(folder, keep=("logs",)))
        except OSError as error:
            raise RunError(f"{folder} cannot be created: {error.strerror or error}") from error
        yield scratch


def _missing_configuration(name: str, needed: str) -> str:
    """The message for a missing configuration if only `name` was given: the folder does not exist, if it looks like a
    path, or what is `needed` besides a model.
    """
    folder, near = Path(name).expanduser(), similar_path_hint(name)
    if folder.is_dir():
        return f"{name} is a model: also give {needed}"
    if folder.exists():
        return f"{name} is a file, not a model, run or checkpoint"
    if not HUB_NAME.fullmatch(name):
        return f"there is no folder {name}{near}, and names on the hub have the form owner/name"
    if near:
        return f"there is no folder {name}{near}. If it is a model on the hub, also give {needed}"
    return f"{name} is not a local folder, so it is taken as a model on the hub: also give {needed}"


def _sampling_run(run: SkyRLTrainConfig, folder: Path) -> SkyRLTrainConfig:
    """The run with all output below `folder`, and without adapters, which are already merged into the weights."""
    changes: Mapping[str, object] = {
        "trainer.run_path": str(folder),
        "trainer.export_path": str(folder),
        "trainer.log_path": str(folder / "logs"),
        "trainer.rollouts_from": None,
        "trainer.policy.model.lora.rank": 0,
    }
    for path, value in changes.items():
        run = evolve_at(run, path, value)
    return run


def _free_folder(preferred: Path) -> Path:
    """The preferred folder, with a number appended if it already exists."""
    numbered = (preferred.with_name(f"{preferred.name}-{number}") for number in count(2))
    return next(folder for folder in chain([preferred], numbered) if not (folder.exists() or is_being_written(folder)))
