"""What a supervised run needs of this machine: packages, files, models. Looked at before the heavy imports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl.config import SupervisedConfig
from skyrl.errors import Problem
from skyrl.experiments import on_machine
from skyrl.tree.rules import Check


def packages_are_there(run: SupervisedConfig) -> Iterator[Problem]:
    """What the chosen strategy and executor import."""
    wanted = [("model.path", "torch", "train"), ("model.path", "transformers", "train")]
    wanted += [("placement.executor", "ray", "ray")] if run.placement.executor == "ray" else []
    wanted += [("strategy", "deepspeed", "deepspeed")] if run.strategy == "deepspeed" else []
    yield from on_machine.packages(wanted)


def the_model_is_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A local folder holds a model; a hub name can only be tried."""
    yield from on_machine.model("model.path", run.model.path)


def the_rows_are_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A source that names a file is there; a hub name can only be tried."""
    yield from on_machine.data("train_datasets", run.train_datasets)
    yield from on_machine.data("eval_datasets", run.eval_datasets)


def _written(run: SupervisedConfig) -> Iterator[tuple[str, str | None]]:
    for field in ("run_path", "ckpt_path", "export_path", "tokenized_path"):
        yield field, getattr(run, field)


def the_template_is_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A file that replaces the chat template can be read."""
    template = run.chat_template
    if template.source == "file" and template.name_or_path and not Path(template.name_or_path).expanduser().is_file():
        yield Problem(path="chat_template.name_or_path", message=f"there is no file {template.name_or_path}")


def the_folders_have_names(run: SupervisedConfig) -> Iterator[Problem]:
    """Whatever a run writes goes into a folder that can be made; a checkpoint that is named is there."""
    for field, path in _written(run):
        yield from on_machine.folder_name(field, path)
    if run.resume_from not in ("", "latest"):
        yield from on_machine.checkpoint("resume_from", run.resume_from, "latest, empty, or a checkpoint")


SUPERVISED_PREFLIGHT: tuple[Check[Any], ...] = (
    packages_are_there,
    the_model_is_there,
    the_rows_are_there,
    the_template_is_there,
    the_folders_have_names,
)
