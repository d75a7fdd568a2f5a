"""`skyrl.evaluate` and `skyrl.generate`: sample from a model, a run or a checkpoint, without training."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any, TypeAlias

from skyrl.api.run import Run
from skyrl.api.source import Config, Source, brief_errors, evaluated, generated, source_of

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
    return evaluated(_name(model), _source(model, config, overrides), step, to)


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
        overrides["data.val_data"] = [fspath(item) for item in (prompts if isinstance(prompts, list) else [prompts])]
    return generated(_name(model), _source(model, config, overrides), step, to)


def _name(model: Model) -> str:
    return str(model.folder) if isinstance(model, Run) else fspath(model)


def _source(model: Model, config: Config, overrides: dict[str, object]) -> Source:
    """The configuration of the sampling. A run that was trained in this program keeps the code that it was given."""
    if config == () and isinstance(model, Run):
        return model.source.with_assignments(overrides)
    return source_of(config, overrides)
