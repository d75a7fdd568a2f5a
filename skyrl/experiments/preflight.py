"""What depends on this machine: files, models, tasks. Looked at with the other checks, before the heavy imports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from skyrl.config import SkyRLTrainConfig
from skyrl.config.effects import evaluates
from skyrl.config.sizes import samples
from skyrl.envs import find_env
from skyrl.errors import Problem, TaskError
from skyrl.models.paths import check_model_path
from skyrl.tree.rules import Check


def models_are_where_they_are_said_to_be(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A local model folder holds a model; a hub name can only be tried."""
    paths = {"trainer.policy.model.path": run.trainer.policy.model.path}
    if run.trainer.algorithm.use_kl_loss and run.trainer.ref.model.path != run.trainer.policy.model.path:
        paths["trainer.ref.model.path"] = run.trainer.ref.model.path
    for field, path in paths.items():
        why = _trouble(path) or check_model_path(path) if path else None
        if why:
            yield Problem(path=field, message=why)


def data_files_exist(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A source that names a file is there; a hub name can only be tried. Recorded samples need no prompts."""
    if not samples(run):
        return
    sources = {"data.train_data": run.data.train_data, "data.val_data": run.data.val_data if evaluates(run) else ()}
    for field, named in sources.items():
        for source in named:
            why = _trouble(source)
            if not why and Path(source).suffix in (".parquet", ".jsonl", ".json"):
                why = None if Path(source).expanduser().is_file() else f"there is no file {source}"
            if why:
                yield Problem(path=field, message=why)


def the_task_can_be_imported(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The environment or reward function of the configuration exists, where it is used."""
    try:
        if run.environment.env_class is not None and samples(run):
            find_env(run.environment.env_class)
    except TaskError as error:
        yield Problem(path="environment.env_class", message=str(error))


def the_checkpoint_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A checkpoint that is named is there."""
    path = run.trainer.resume_path
    if (
        path
        and "://" not in path
        and (why := _trouble(path) or (None if Path(path).expanduser().is_dir() else f"there is no folder {path}"))
    ):
        yield Problem(path="trainer.resume_path", message=why)


def folders_have_names(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Whatever a run writes goes into a folder that the user named, and not beside it."""
    trainer = run.trainer
    folders = {"run_path": trainer.run_path, "ckpt_path": trainer.ckpt_path, "export_path": trainer.export_path}
    for name, path in folders.items():
        why = "is empty: name a folder" if path == "" else path and _trouble(path)
        if why:
            yield Problem(path=f"trainer.{name}", message=why)


def the_recording_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A recording that is to be trained on is there."""
    path = run.trainer.rollouts_from
    if path is None:
        return
    why = _trouble(path)
    if not why and not (Path(path).expanduser() / "recording" / "about.json").is_file():
        why = f"there is no recording in {path or 'an empty path'}: name the folder of a run with trainer.recording on"
    if why:
        yield Problem(path="trainer.rollouts_from", message=why)


PREFLIGHT: tuple[Check[SkyRLTrainConfig], ...] = (
    models_are_where_they_are_said_to_be,
    data_files_exist,
    the_task_can_be_imported,
    the_checkpoint_exists,
    folders_have_names,
    the_recording_exists,
)


def _trouble(path: str) -> str | None:
    """Why the file system will not even look at the path, such as the home of a user who does not exist."""
    try:
        Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path[:80]!r} is not a path here: {error}"
    return None
