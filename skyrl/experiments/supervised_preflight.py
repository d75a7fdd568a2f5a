"""What a supervised run needs of this machine: packages, files, models. Looked at before the heavy imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl.config import SupervisedConfig
from skyrl.errors import Problem
from skyrl.models.paths import check_model_path
from skyrl.tree.rules import Check


def packages_are_there(run: SupervisedConfig) -> Iterator[Problem]:
    """What the chosen strategy and executor import."""
    wanted = [("model.path", "torch", "train"), ("model.path", "transformers", "train")]
    wanted += [("placement.executor", "ray", "ray")] if run.placement.executor == "ray" else []
    wanted += [("strategy", "deepspeed", "deepspeed")] if run.strategy == "deepspeed" else []
    for path, package, extra in wanted:
        if importlib.util.find_spec(package) is None:
            message = f"needs the package {package}, which is not installed"
            yield Problem(path=path, message=message, hint=f"pip install 'skyrl[{extra}]'")


def the_model_is_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A local folder holds a model; a hub name can only be tried."""
    why = _trouble(run.model.path) or check_model_path(run.model.path) if run.model.path else None
    if why:
        yield Problem(path="model.path", message=why)


def the_rows_are_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A source that names a file is there; a hub name can only be tried."""
    for field, sources in (("train_datasets", run.train_datasets), ("eval_datasets", run.eval_datasets)):
        for source in sources:
            why = _trouble(source)
            if not why and Path(source).suffix in (".parquet", ".jsonl", ".json"):
                why = None if Path(source).expanduser().is_file() else f"there is no file {source}"
            if why:
                yield Problem(path=field, message=why)


def the_folders_have_names(run: SupervisedConfig) -> Iterator[Problem]:
    """Whatever a run writes goes into a folder that can be made; a checkpoint that is named is there."""
    for field, path in (("run_path", run.run_path), ("ckpt_path", run.ckpt_path), ("export_path", run.export_path)):
        why = "is empty: name a folder" if path == "" else path and _trouble(path)
        if why:
            yield Problem(path=field, message=why)
    named = run.resume_from
    if named not in ("", "latest") and "://" not in named and not Path(named).expanduser().is_dir():
        yield Problem(path="resume_from", message=f"there is no folder {named}", hint="latest, empty, or a checkpoint")


SUPERVISED_PREFLIGHT: tuple[Check[Any], ...] = (
    packages_are_there,
    the_model_is_there,
    the_rows_are_there,
    the_folders_have_names,
)


def _trouble(path: str) -> str | None:
    try:
        Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path[:80]!r} is not a path here: {error}"
    return None
