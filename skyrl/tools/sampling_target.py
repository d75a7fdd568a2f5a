"""The model that `skyrl eval`, `generate` and `serve` sample from: a model, a run, or one of its checkpoints.

skyrl eval Qwen/Qwen3-0.6B run.toml             a model: a folder in Hugging Face format, or a name on its hub
skyrl eval runs/mine                            a run: the trained model, or with --step its checkpoint of that step
skyrl eval runs/mine/checkpoints/global_step_40 a checkpoint
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from skyrl.checkpoint.manifest import FILE as MANIFEST
from skyrl.checkpoint.names import name_of, step_of
from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.run_kind import RunKind
from skyrl.config.loading.kinds import kind_of, samples_rollouts
from skyrl.config.loading.load import Composed, chosen_root, compose
from skyrl.errors import ResumeError, UserError
from skyrl.runs.stored_runs import Run, checkpoints_of, run_of, stored_run
from skyrl.tree import required
from skyrl.tree.files import is_stored_form, stored_text

WITHOUT_ENVIRONMENT = (
    "environment.env_class=null",
    "environment.agent.command=[]",
    "environment.agent.function=null",
)
"""Overrides that disable the task's code: a stored configuration may name code that the user has not approved."""


@frozen(kw_only=True)
class Target:
    """A model to sample from, before anything is loaded."""

    name: str
    """Name as the user gave it."""

    step: int
    """Number of training steps of the weights; 0 if unknown. It is part of the seed of every sample, as in the run's
    own evaluation after that step."""

    model: str
    """Model folder or hub name; for a checkpoint, the model from which the run started."""

    run: Path | None = None
    """The run's folder, if the user named a run."""

    checkpoint: Path | None = None
    """Folder of the checkpoint whose weights are sampled from. None: the weights are those of `model`."""

    @property
    def stored(self) -> str | None:
        """Folder with the configuration of the run that produced the model, if there is one."""
        folder = self.run or self.checkpoint
        return None if folder is None else str(folder)


def find_target(name: str, step: int | None = None) -> Target:
    """The target that `name` refers to; `step` selects a checkpoint of a run.

    Raises `UserError` for `step` with anything but a run, and `ResumeError` for a missing checkpoint.
    """
    folder = Path(name).expanduser()
    if (folder / MANIFEST).is_file():
        target = _checkpoint(name, folder)
    elif _is_run(folder):
        return _run_target(name, folder, step)
    else:
        target = Target(name=name, step=_exported_after(folder), model=name if not folder.is_dir() else str(folder))
    if step is not None:
        raise UserError(f"--step {step}: {name} is not the folder of a run, so it has no checkpoints to choose from")
    return target


def _run_target(name: str, folder: Path, step: int | None) -> Target:
    model = folder / "model"
    if step is None and model.is_dir():
        return Target(name=name, step=_last_step(folder), model=str(model), run=folder)
    checkpoints = Path(checkpoints_of(str(folder)))
    if step is None:
        steps = [
            saved_step for path in checkpoints.glob(name_of(0).rstrip("0") + "*") if (saved_step := step_of(path.name))
        ]
        if not steps:
            raise ResumeError(f"{folder} has neither a trained model nor a checkpoint yet")
        step = max(steps)
    checkpoint = checkpoints / name_of(step)
    if not (checkpoint / MANIFEST).is_file():
        raise ResumeError(f"there is no checkpoint of step {step} in {checkpoints}")
    return evolve(_checkpoint(name, checkpoint), run=folder)


def _checkpoint(name: str, folder: Path) -> Target:
    run = _run_in(folder)
    model = required(kind_of(run).trained.section(run).model.path, "the path of the model")
    return Target(name=name, step=step_of(folder.absolute().name) or 0, model=model, checkpoint=folder)


def _is_run(folder: Path) -> bool:
    """Whether the folder is a run's, by the content of `config.json`, a file that model folders have, too."""
    try:
        return is_stored_form(json.loads(stored_text(folder / "config.json")))
    except (OSError, ValueError, RecursionError):
        return False


def _last_step(folder: Path) -> int:
    """The last step of a finished run."""
    from skyrl.runs.run_folder import RunFolder

    steps: Sequence[int] = [int(record["step"]) for record in RunFolder(folder).metrics.read()]
    return max(steps, default=0)


def _exported_after(folder: Path) -> int:
    """The step in the path of an exported model, such as `exports/global_step_40/policy`; for a run's final `model`,
    the last step; 0 if unknown.
    """
    if folder.name == "model" and _is_run(folder.parent):
        return _last_step(folder.parent)
    match = re.search(r"global_step_(\d+)/[^/]+/?$", str(folder))
    return int(match[1]) if match and folder.is_dir() else 0


def stored_configuration(target: Target) -> list[str]:
    """The file layers to use if the user named no configuration: those of the run, if there is one that samples. The
    model of a run of SFT is a model like any other.

    Raises `UserError` for a reward model.
    """
    if target.stored is None:
        return []
    run = _run_in(Path(target.stored))
    if kind_of(run).trained.scores:
        raise UserError(f"{target.name} is a run of kind = reward_model, which scores chats: use skyrl serve-reward")
    return [target.stored] if samples_rollouts(run) else []


def stored_run_of(target: Target) -> Run:
    """The configuration of the run that produced the model of a target that has one."""
    return _run_in(Path(required(target.stored, "the folder of the run")))


def compose_sampling(
    files: Sequence[str],
    overrides: Sequence[str | tuple[str, Any]],
    also: Callable[[RunKind], Sequence[Any]] | None = None,
) -> Composed[SkyRLTrainConfig]:
    """The configuration of sampling, resolved and checked; `also` gives further checks. Raises `ConfigError`, and
    `UserError` for another kind of run.
    """
    overrides = [*overrides, ("trainer.callbacks", ())]
    chosen = chosen_root(files, overrides)()
    if not samples_rollouts(chosen):
        hint = "leave it out, or pass one of kind = rl; data.val_data=prompts.jsonl names the prompts without a file"
        raise UserError(
            f"the configuration is of kind = {kind_of(chosen).name}, which does not say how to sample: {hint}"
        )
    return compose(files, overrides, also=also, environ=os.environ)


def model_of(target: Target, folder: Path) -> str:
    """Folder or hub name of the target's model; the weights of a checkpoint are stored as a model in `folder`."""
    if target.checkpoint is None:
        return target.model
    from skyrl.tools.exporting import export

    export(target.checkpoint, step=target.step, to=folder, checkpoints=target.checkpoint.absolute().parent)
    return str(folder)


def scoring_model(name: str) -> str:
    """The folder or hub name of the reward model that `name` refers to: itself, or the trained model of a run.

    Raises `UserError` for a run of another kind, and for a checkpoint, which is no model.
    """
    target = find_target(name)
    if target.stored is None:
        return target.model
    run = _run_in(Path(target.stored))
    if not kind_of(run).trained.scores:
        raise UserError(f"{name} is a run of kind = {run.kind}, whose model scores nothing: name a reward model")
    if target.checkpoint is not None:
        raise UserError(f"{name} has no trained model: skyrl export {name} --to FOLDER writes one from a checkpoint")
    return target.model


def _run_in(folder: Path) -> Run:
    """The configuration in the folder of a run, or of a checkpoint."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return stored_run(folder)
    try:
        stored = json.loads(stored_text(manifest))["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResumeError(f"{manifest} cannot be read: {error}") from error
    return run_of(stored, str(manifest))
