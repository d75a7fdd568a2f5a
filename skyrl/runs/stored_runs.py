"""A run stored in its folder: its configuration, and the current location of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

from skyrl.checkpoint.names import step_of
from skyrl.config import PreferenceConfig, RewardModelConfig, SFTConfig, SkyRLTrainConfig
from skyrl.config.loading.kinds import KINDS, root_of, samples_rollouts
from skyrl.config.loading.stored import tree_of
from skyrl.errors import ResumeError, UserError
from skyrl.tree.files import stored_text

Run: TypeAlias = SkyRLTrainConfig | SFTConfig | RewardModelConfig | PreferenceConfig

_FILE = "config.json"


def stored_run(folder: Path) -> Run:
    """The configuration in a run's folder. Raises `UserError`, and `ConfigError` for one of another version."""
    file = folder / _FILE
    try:
        stored = json.loads(stored_text(file))["config"]
    except OSError:
        raise UserError(f"{folder} is not the folder of a run: it contains no {_FILE}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResumeError(f"{file} cannot be read: {error}") from error
    return run_of(stored, str(file))


def run_of(stored: object, where: str) -> Run:
    """The run of a stored configuration, such as that in a checkpoint; `where` is for messages."""
    kind: Any = stored.get("kind", "rl") if isinstance(stored, dict) else None
    if kind not in KINDS:
        raise ResumeError(f"{where} cannot be read: it says kind = {kind!r}, but the kinds are {', '.join(KINDS)}")
    run: Any = tree_of(stored, root_of(kind), where)
    result: Run = run
    return result


def refuse_supervised(folder: Path, instead: str) -> None:
    """Raise `UserError` for the folder of a supervised run, which samples nothing; `instead` says what to do."""
    if (folder / _FILE).is_file() and not samples_rollouts(run := stored_run(folder)):
        raise UserError(f"{folder} is a run of kind = {run.kind}, which samples nothing: {instead}")


def runs_below(folder: Path, command: str) -> str:
    """The end of a message for a folder that is no run but has some, newest first: how to name one. Empty if none."""
    below = [path.parent for path in folder.glob(f"*/{_FILE}")]
    newest = sorted(below, key=lambda path: -path.stat().st_mtime)
    return f"; it is a folder of runs: {command} {newest[0]}" if newest else ""


def place_of(path: str, folder: Path, run: Run) -> str:
    """Current location of a path of the run whose folder is now `folder`; the folder's contents have moved with it."""
    if "://" in path:
        return path
    before = Path(run.trainer.folder("run_path")).expanduser().absolute()
    location = Path(path).expanduser().absolute()
    return str(folder / location.relative_to(before) if location.is_relative_to(before) else location)


def started_in(folder: Path, run: Run) -> Path:
    """The folder in which the relative paths of the run start, whose folder is now `folder`. It is that of the command
    if the run's folder was moved out of it.
    """
    at = Path(run.trainer.folder("run_path")).expanduser().parts
    absolute = folder.absolute()
    return Path(*absolute.parts[: -len(at)]) if at and absolute.parts[-len(at) :] == at else Path.cwd()


def checkpoints_of(folder: str) -> str:
    """The folder of a run's checkpoints, given the run's folder. A folder that holds checkpoints itself, or that is no
    run's folder, is returned.
    """
    path = Path(folder).expanduser()
    if "://" in folder or not (path / _FILE).is_file() or any(step_of(item.name) for item in path.iterdir()):
        return folder if "://" in folder else str(path)
    run = stored_run(path)
    location = place_of(run.trainer.folder("ckpt_path"), path, run)
    inside = Path(location).is_relative_to(path)
    return str(path) if inside and not Path(location).is_dir() else location  # none yet, in this folder
