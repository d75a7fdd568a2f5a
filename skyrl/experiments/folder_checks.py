"""Checks of the folders that a run writes into: they can be made, no other run holds them, and the disk has space."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.rl_models import has_critic
from skyrl.config.foundation.intervals import read_interval
from skyrl.config.loading.code_digests import changed_code, code_digests, stored_digests
from skyrl.config.loading.kinds import samples_rollouts
from skyrl.errors import Problem, ResumeError
from skyrl.experiments.model_checks import readable_files
from skyrl.runs.run_lock import MANIFEST, SIGNATURE, refused_changes, stored_config, values_apart
from skyrl.runs.run_owner import in_use_message, is_locked
from skyrl.runs.run_tree import AnyRun
from skyrl.storage.disk import nearest, readable
from skyrl.tracking.run_progress import FILE
from skyrl.tree.rules import itself

BYTES_OF_A_WEIGHT = 12
"""Bytes in a checkpoint for each trained weight: the weight and Adam's two moments, each as a 32-bit float."""


def folders_can_be_written(run: AnyRun) -> Iterator[Problem]:
    """Each folder of the run is named, can be written to, and is not in use by another run. A folder inside one that is
    reported is not reported again.
    """
    reported: list[Path] = []
    for field, text in _folders(run).items():
        if text == "":
            yield Problem(path=field, message="is empty: set it to a folder")
            continue
        try:
            folder = Path(text).expanduser().absolute()
            if any(folder.is_relative_to(item) for item in reported):
                continue
            with tempfile.TemporaryFile(dir=nearest(folder)):  # can be written; leaves nothing
                pass
            locked = is_locked(folder)
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            yield Problem(path=field, message=f"{text[:80]} cannot be written to: {reason}")
            reported.append(Path(text).absolute())
            continue
        if locked:
            yield Problem(path=field, message=in_use_message(folder, field))
            reported.append(folder)


def folders_belong_to_run(run: AnyRun) -> Iterator[Problem]:
    """A folder that belongs to a run belongs to this one, and so does the checkpoint that is named: a setting that has
    changed since is reported at its place.
    """
    run = itself(run)
    yield from _folder_of_runs(run)
    folders = {field: (text, SIGNATURE) for field, text in _folders(run).items()}
    if (named := run.trainer.resume_path) and run.trainer.recover_mode is None and "://" not in named:
        folders[run.trainer.path_of("resume_path")] = (named, MANIFEST)
    for field, (text, name) in folders.items():
        try:
            folder = Path(text).expanduser()
            stored = stored_config(folder / name, field)
            changes = None if stored is None else refused_changes(stored, run, str(folder))
        except (ResumeError, RuntimeError, ValueError) as error:
            yield Problem(path=field, message=str(error))
            return
        if changes is not None:
            for path, values in changes.values.items():
                yield Problem(path=path, message=values_apart(*values))
            yield Problem(
                path=field,
                message=f"{folder} belongs to a run with another configuration",
                hint=f"set back what differs{changes.remedies}; or start a new run: {changes.folders}",
            )
            return  # the other folders are usually inside this one


def _folder_of_runs(run: AnyRun) -> Iterator[Problem]:
    """The problem of a run's folder in which other runs have theirs, as when a variable at the end of a path is unset.
    A folder that belongs to a run already stays that run's.
    """
    text = run.trainer.run_path
    if not text:  # of a broken configuration; another check reports it
        return
    try:
        folder = Path(text).expanduser()
        others = [] if (folder / SIGNATURE).exists() else sorted(file.parent.name for file in folder.glob(f"*/{FILE}"))
    except (OSError, RuntimeError, ValueError):  # another check reports it
        return
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        yield Problem(
            path=run.trainer.path_of("run_path"),
            message=f"{text} has the folders of other runs inside, {others[0]}{more}: each run has a folder of its own",
            hint="choose one that does not exist yet; is a variable in it unset?",
        )


def code_is_unchanged(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Code that the run names is unchanged since the run in this folder was last started. A change is a warning, or an
    error with `--strict`.
    """
    before = stored_digests(str(run.trainer.run_path))
    for name in changed_code(before, code_digests(run)):
        field, _, file = name.partition(": ")
        yield Problem(
            path=field,
            message=f"{file} has changed since the run in {run.trainer.run_path} was last started",
            hint="steps after a checkpoint would be judged by different code: choose another trainer.run_path to "
            "start a new run",
            severity="warning",
        )


def disk_holds_checkpoints(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The disk of the checkpoints has space for those that are kept. Sizes are estimated from `config.json`, unless the
    models are not here or train adapters.
    """
    trainer = run.trainer
    models = [trainer.policy.model, *([trainer.critic.model] if has_critic(run) else [])]
    files = [readable_files(model.path) for model in models if not model.lora.rank]
    size = BYTES_OF_A_WEIGHT * sum(item.parameters or 0 for item in files if item)
    if not size or "://" in trainer.ckpt_path or not read_interval(trainer.ckpt_interval).ever:
        return
    try:
        disk = shutil.disk_usage(nearest(Path(trainer.ckpt_path).expanduser().absolute()))
    except (OSError, RuntimeError, ValueError):  # another check reports it
        return
    if disk.total == 0:  # no disk at all, such as /proc
        return
    free = disk.free
    kept = 2 if trainer.max_ckpts_to_keep < 1 else trainer.max_ckpts_to_keep + 1  # a new one exists before one goes
    if free < size:
        message = f"a checkpoint of this model takes about {readable(size)}, but {readable(free)} are free there"
        yield Problem(path="trainer.ckpt_path", message=message, hint="choose a folder on another disk")
    elif free < kept * size:
        yield Problem(
            path="trainer.ckpt_path",
            message=f"{kept} checkpoints of about {readable(size)} each exist at the same time, but {readable(free)} "
            "are free there",
            hint="choose a folder on another disk, or keep fewer (trainer.max_ckpts_to_keep)",
            severity="warning",
        )


def _folders(run: AnyRun) -> Mapping[str, str]:
    """Dotted path and name of each folder on a disk that the run writes into."""
    names = ("run_path", "ckpt_path", "export_path")
    result = {run.trainer.path_of(name): getattr(run.trainer, name) for name in names}
    path, of_rows = (
        ("data.tokenized_path", run.data.tokenized_path)
        if samples_rollouts(run)
        else ("tokenized_path", run.tokenized_path)
    )
    if of_rows is not None:
        result[path] = of_rows
    return {field: text for field, text in result.items() if text is not None and "://" not in text}
