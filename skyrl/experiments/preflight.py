"""What depends on this machine, looked at before anything heavy is imported: files, models, tasks. Everything at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from skyrl.config import SkyRLTrainConfig
from skyrl.envs import find_env
from skyrl.errors import ConfigError, Problem, TaskError
from skyrl.models.paths import check_model_path
from skyrl.tree.origins import Origins, place_of


def preflight(run: SkyRLTrainConfig, origins: Origins) -> None:
    """Raises `ConfigError` with every path that leads nowhere and every name that cannot be imported."""
    problems = [
        attrs.evolve(problem, place=place_of(problem.path, origins))
        for problem in (*_models(run), *_data(run), *_task(run), *_checkpoint(run))
    ]
    if problems:
        raise ConfigError(problems)


def _models(run: SkyRLTrainConfig) -> Iterator[Problem]:
    paths = {"trainer.policy.model.path": run.trainer.policy.model.path}
    if run.trainer.algorithm.use_kl_loss and run.trainer.ref.model.path != run.trainer.policy.model.path:
        paths["trainer.ref.model.path"] = run.trainer.ref.model.path
    for field, path in paths.items():
        why = check_model_path(path) if path else None
        if why:
            yield Problem(path=field, message=why)


def _data(run: SkyRLTrainConfig) -> Iterator[Problem]:
    evaluates = run.trainer.eval_before_train or run.trainer.eval_interval > 0
    for field, sources in (("data.train_data", run.data.train_data), ("data.val_data", run.data.val_data)):
        if field == "data.val_data" and not evaluates:
            continue
        for source in sources:
            if Path(source).suffix in (".parquet", ".jsonl", ".json") and not Path(source).expanduser().is_file():
                yield Problem(path=field, message=f"there is no file {source}")


def _task(run: SkyRLTrainConfig) -> Iterator[Problem]:
    try:
        if run.environment.env_class is not None:
            find_env(run.environment.env_class)
    except TaskError as error:
        yield Problem(path="environment.env_class", message=str(error))


def _checkpoint(run: SkyRLTrainConfig) -> Iterator[Problem]:
    path = run.trainer.resume_path
    if path and not Path(path).expanduser().is_dir():
        yield Problem(path="trainer.resume_path", message=f"there is no folder {path}")
