"""What depends on this machine: files, models, tasks. Looked at with the other checks, before the heavy imports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from skyrl.config import SkyRLTrainConfig
from skyrl.config.effects import evaluates
from skyrl.config.sizes import samples
from skyrl.envs import find_env
from skyrl.errors import Problem, TaskError
from skyrl.experiments import on_machine
from skyrl.experiments.installation import INSTALLATION, keys_are_there
from skyrl.tree.rules import Check


def models_are_where_they_are_said_to_be(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A local model folder holds a model; a hub name can only be tried."""
    paths = {"trainer.policy.model.path": run.trainer.policy.model.path}
    if run.trainer.algorithm.use_kl_loss and run.trainer.ref.model.path != run.trainer.policy.model.path:
        paths["trainer.ref.model.path"] = run.trainer.ref.model.path
    for field, path in paths.items():
        yield from on_machine.model(field, path)


def data_files_exist(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A source that names a file is there; a hub name can only be tried. Recorded samples need no prompts."""
    if not samples(run):
        return
    yield from on_machine.data("data.train_data", run.data.train_data)
    if evaluates(run):
        yield from on_machine.data("data.val_data", run.data.val_data)


def the_task_can_be_imported(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The environment or reward function of the configuration exists, where it is used."""
    try:
        if run.environment.env_class is not None and samples(run):
            find_env(run.environment.env_class)
    except TaskError as error:
        yield Problem(path="environment.env_class", message=str(error))


def the_checkpoint_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A checkpoint that is named is there."""
    if path := run.trainer.resume_path:
        yield from on_machine.checkpoint("trainer.resume_path", path)


def folders_have_names(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Whatever a run writes goes into a folder that the user named, and not beside it."""
    trainer = run.trainer
    yield from on_machine.folder_name("trainer.run_path", trainer.run_path)
    yield from on_machine.folder_name("trainer.ckpt_path", trainer.ckpt_path)
    yield from on_machine.folder_name("trainer.export_path", trainer.export_path)


def the_recording_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A recording that is to be trained on is there."""
    path = run.trainer.rollouts_from
    if path is None:
        return
    why = on_machine.no_path(path)
    if not why and not (Path(path).expanduser() / "recording" / "about.json").is_file():
        why = f"there is no recording in {path or 'an empty path'}: name the folder of a run with trainer.recording on"
    if why:
        yield Problem(path="trainer.rollouts_from", message=why)


PREFLIGHT: tuple[Check[SkyRLTrainConfig], ...] = (
    *INSTALLATION,
    keys_are_there(os.environ),
    models_are_where_they_are_said_to_be,
    data_files_exist,
    the_task_can_be_imported,
    the_checkpoint_exists,
    folders_have_names,
    the_recording_exists,
)
