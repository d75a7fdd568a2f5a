"""One folder holds one run, and one process at a time writes into it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import cattrs
from attrs import frozen
from filelock import FileLock, Timeout

from skyrl.config.loading.check import has_effect
from skyrl.config.loading.code_digests import code_digests
from skyrl.config.loading.kinds import kind_of
from skyrl.config.loading.stored import stored_form, stored_tree, tree_of
from skyrl.config.loading.stored_code import record_code
from skyrl.errors import ConfigError, ResumeError, UserError
from skyrl.processes.redaction import redacted_configuration
from skyrl.runs.run_owner import LOCK, in_use_message, sign, unsign
from skyrl.runs.run_tree import AnyRun
from skyrl.storage.atomic import write_file
from skyrl.tree import differences, get_at
from skyrl.tree.access import is_written
from skyrl.tree.dump import short_json
from skyrl.tree.files import STORED_FILES, stored_text

C = TypeVar("C", bound=AnyRun)

SIGNATURE, MANIFEST = STORED_FILES
"""Names of the files with the configuration of the run that a folder belongs to, and of a checkpoint."""


class RunLock:
    """A folder that a run writes into: locked before anything is started, and marked with the run's configuration."""

    def __init__(self, folder: Path, field: str, run: AnyRun) -> None:
        """`field` is the dotted path of the configuration that names the folder."""
        self.folder = folder
        self._field, self._run = field, run
        self._lock = FileLock(folder / LOCK)
        self._signature = folder / SIGNATURE
        self._is_new = False

    def acquire(self) -> None:
        """Create the folder and lock it.

        Raises `UserError` if it cannot be created or another process holds it, `ResumeError` if it belongs to another
        run.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            sign(self.folder)
        except Timeout:
            raise UserError(in_use_message(self.folder, self._field)) from None
        except OSError as error:
            raise UserError(f"{self._field} = {self.folder} cannot be written to: {error.strerror}") from None
        try:
            stored = stored_config(self._signature, self._field)
            if stored is not None:
                refuse_changed(stored, self._run, str(self.folder), self._field)
        except ResumeError:
            self.release()
            raise

    def write_config(self, text: str) -> None:
        """Write `config.json` with this content of `config_text`."""
        self._is_new = not self._signature.exists()
        write_file(self._signature, text)
        record_code(self._run, [str(self.folder), self._run.trainer.folder("ckpt_path")])

    def remove_config(self) -> None:
        """Remove `config.json` again if this session wrote it first, for a session that has kept nothing there."""
        if self._is_new:
            self._signature.unlink(missing_ok=True)
            (self.folder / LOCK).unlink(missing_ok=True)

    def release(self) -> None:
        """Unlock the folder for the next process."""
        unsign(self.folder)
        self._lock.release()


def config_text(run: AnyRun, locations: Mapping[str, str]) -> str:
    """Content of `config.json`: the resolved configuration, its fingerprint, digests of the user's code, and
    `locations`, where values were written.
    """
    stored = stored_form(run) | {"code": code_digests(run), "places": dict(locations)}
    return json.dumps(redacted_configuration(stored), indent=1, ensure_ascii=False) + "\n"


def stored_config(file: Path, field: str) -> object:
    """The configuration in a file of a run's or a checkpoint's folder; None if there is none. `field` names the folder
    in messages.

    Raises `ResumeError` for one that is damaged.
    """
    try:
        text = stored_text(file)
        return json.loads(text)["config"] if text else None
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        other = f"choose another {field}"
        remedy = f"delete it, since every checkpoint has its own copy, or {other}" if file.name == SIGNATURE else other
        raise ResumeError(f"{file} is damaged ({error}): {remedy}") from error


@frozen(kw_only=True)
class Changes:
    """Differences that keep a run from continuing another one."""

    values: Mapping[str, tuple[Any, Any]]
    """Dotted path -> the value of the other run, and of this one."""

    remedies: str
    """How to continue, after "set these back"."""

    folders: str
    """Arguments that start a new run instead."""


def refused_changes(stored: object, run: AnyRun, where: str) -> Changes | None:
    """Compare a stored configuration with this run's: the fields that identify a run and, unless
    `trainer.resume_with_changes` is on, all fields that determine its numbers. A field without effect in both runs,
    such as a setting of another loss whose default has changed since, is ignored, and so is a value that follows from
    others that differ. None if nothing keeps the run from continuing.

    Raises `ResumeError` for a configuration that this version cannot read.
    """
    try:
        before = tree_of(stored, type(run), where)
        now = _stored_form(run)
    except ConfigError as error:
        raise ResumeError(f"{where} has a configuration that this version cannot read: {error}") from error
    changed = _acting(differences(before, now, roles=("identity",)), before, now)
    numerics = _acting(differences(before, now, roles=("numerics",)), before, now)
    if not run.trainer.resume_with_changes:
        changed |= numerics
    if not changed:
        return None
    field = run.trainer.path_of("resume_with_changes")
    remedies = f", or keep the changes with {field}=true" if changed.keys() == numerics.keys() else ""
    return Changes(
        values=_causes(changed, before, run),
        remedies=remedies,
        folders=" ".join(f"{path}={folder}" for path, folder in free_folders(run).items()),
    )


def refuse_changed(stored: object, run: AnyRun, where: str, field: str) -> None:
    """Raise `ResumeError` with the differences and the possible remedies if `refused_changes` finds any."""
    if changes := refused_changes(stored, run, where):
        raise ResumeError(
            f"{where} belongs to a run with another configuration:\n{_rows(changes.values)}\n"
            f"To continue that run, set these back{changes.remedies}. To start a new one, choose another {field}, for "
            f"example:\n  {changes.folders}"
        )


def _acting(changed: Mapping[str, tuple[Any, Any]], before: C, now: C) -> dict[str, tuple[Any, Any]]:
    return {path: values for path, values in changed.items() if has_effect(before, path) or has_effect(now, path)}


def _causes(changed: Mapping[str, tuple[Any, Any]], before: C, run: C) -> dict[str, tuple[Any, Any]]:
    """The differences without values that nobody wrote here, and that follow from others of them in either run."""
    rules = {rule.writes: rule for rule in kind_of(run).rules}

    def follows(path: str) -> bool:
        step = rules.get(path)
        if step is None or is_written(run, path) or step.compute(before) != get_at(before, path):
            return False
        return any(read in changed or follows(read) for read in step.reads)

    return {path: values for path, values in changed.items() if not follows(path)}


def changes_since(stored: object, run: AnyRun) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> the value of a resumed run's earlier configuration, and this one's, where they differ."""
    before, now = tree_of(stored, type(run), "the checkpoint"), _stored_form(run)
    prefixes = tuple(run.trainer.path_of(start) for start in ("resume_", "recover_"))
    changed = differences(before, now)
    relevant = {path: values for path, values in changed.items() if not path.startswith(prefixes)}
    return _causes(relevant, before, run)


def changes_to_say(stored: object, run: AnyRun) -> str:
    """The result of `changes_since`, a line for each field; empty if there are none."""
    return _rows(changes_since(stored, run))


def _stored_form(run: C) -> C:
    return cattrs.structure(redacted_configuration(stored_tree(run)), type(run))


def _rows(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "\n".join(f"  {path}: {values_apart(*values)}" for path, values in changed.items())


def values_apart(other: object, own: object) -> str:
    """Two values of a field, of another run and of this one, in words."""
    return f"{short_json(other)} there, {short_json(own)} here"


def free_folders(run: AnyRun) -> dict[str, str]:
    """Path of a field -> a folder that belongs to no run, such that everything the run writes is inside. The folders of
    checkpoints and exports follow `run_path`, except for those that were set to another place.
    """
    own = run.trainer.folder("run_path").rstrip("/")
    names = itertools.chain([own], (f"{own}-{number}" for number in itertools.count(2)))
    free = next(name for name in names if not (Path(name).expanduser() / SIGNATURE).exists())
    folders = {"run_path": free}
    for field, name in (("ckpt_path", "checkpoints"), ("export_path", "exports")):
        if getattr(run.trainer, field) != f"{own}/{name}":
            folders[field] = f"{free}/{name}"
    return {run.trainer.path_of(field): folder for field, folder in folders.items()}
