"""`skyrl.evaluate` and `skyrl.generate`: sample from a model, a run or a checkpoint, without training."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from skyrl.api.brief_errors import brief_errors
from skyrl.api.run import Run
from skyrl.api.source import Config, Source, source_of, warn
from skyrl.processes.torch_environment import set_torch_environment
from skyrl.tools.sampling_alone import prepared
from skyrl.tools.sampling_target import Target, find_target

if TYPE_CHECKING:
    from skyrl.experiments.standalone import StandaloneSampling

Model: TypeAlias = Run | str | PathLike[str]
"""A run, its folder, a checkpoint, or a model: a folder in Hugging Face format or a name on its hub."""


@brief_errors
def evaluate(
    model: Model,
    config: Config = (),
    *,
    step: int | None = None,
    to: str | PathLike[str] | None = None,
    **overrides: object,
) -> dict[str, Any]:
    """Evaluate a model on `data.val_data`, as `skyrl eval` does.

    Args:
        model: A run, its folder, one of its checkpoints, or a model in Hugging Face format.
        config: Configuration of the evaluation; a run's own by default. See `train`.
        step: Step of the run's checkpoint to evaluate; by default the trained model.
        to: Folder of results and samples; by default `evaluations/step_<n>` in the run's folder.
        overrides: Values of fields, as in `train`.

    Returns:
        The content of `results.json`: `metrics` by name, such as `eval/all/avg_score`, `intervals` with the bounds of
        their 95 % confidence intervals, and what was evaluated.

    Raises:
        UserError: Model, configuration or data cannot be used. `ResumeError`: there is no such checkpoint.
        RunError: Sampling or rewarding failed.

    Example:
        skyrl.evaluate(run)["metrics"]["eval/all/avg_score"]
    """
    target = _target(model, step)
    with _prepared(model, target, config, overrides, to, rewarded=True) as (sampling, _):
        from skyrl.tools.evaluating import evaluate as evaluated

        return evaluated(target, sampling)


@brief_errors
def generate(
    model: Model,
    prompts: str | PathLike[str] | list[str] | None = None,
    config: Config = (),
    *,
    step: int | None = None,
    to: str | PathLike[str] | None = None,
    **overrides: object,
) -> list[dict[str, Any]]:
    """Sample answers to prompts, without an environment and without rewards, as `skyrl generate` does.

    Args:
        model: A run, its folder, one of its checkpoints, or a model in Hugging Face format.
        prompts: Source of prompts, or several; by default `data.val_data` of the configuration.
        config: Configuration of the sampling; a run's own by default. See `train`.
        step: Step of the run's checkpoint to sample from; by default the trained model.
        to: Folder of the answers; by default `generations/step_<n>` in the run's folder.
        overrides: Values of fields, as in `train`.

    Returns:
        A dictionary for each answer, in the order of the prompts: `prompt`, `response`, `response_ids`, `stop_reason`,
        `logprob` in nats, and more.

    Raises:
        UserError: Model, configuration or prompts cannot be used. `ResumeError`: there is no such checkpoint.
        RunError: Sampling failed.
    """
    if prompts is not None:
        overrides["data.val_data"] = [fspath(each) for each in (prompts if isinstance(prompts, list) else [prompts])]
    target = _target(model, step)
    with _prepared(model, target, config, overrides, to, rewarded=False) as (sampling, _):
        from skyrl.tools.generating import ANSWERS
        from skyrl.tools.generating import generate as generated

        generated(target, sampling)
        text = (sampling.folder.path / ANSWERS).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def _target(model: Model, step: int | None) -> Target:
    return find_target(str(model.folder) if isinstance(model, Run) else fspath(model), step)


def _prepared(
    model: Model,
    target: Target,
    config: Config,
    overrides: dict[str, object],
    to: str | PathLike[str] | None,
    *,
    rewarded: bool,
) -> AbstractContextManager[tuple[StandaloneSampling, Path]]:
    """The sampling of the target. A run that was trained in this program is sampled with the code that it was given."""
    set_torch_environment()
    given = config if config != () or not isinstance(model, Run) else model.source
    source = given.given(overrides) if isinstance(given, Source) else source_of(given, overrides)
    folder = None if to is None else Path(to)
    return prepared(target, source.files, source.assignments, rewarded=rewarded, to=folder, warn=warn)
