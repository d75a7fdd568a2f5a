"""The checkpoints of a run: `ckpt_path/global_step_N/`, each complete or absent, on a disk or in an object store.

    global_step_40/
        policy/rank_0_of_2.safetensors    the shards of each rank of each model
        policy/rank_1_of_2.safetensors
        state.json                        everything else that a resumed run needs
        manifest.json                     name, size and digest of each file, and the configuration: written last

On a disk, a checkpoint is written into a temporary folder, which is moved into place once all of it is durable. In an
object store, a folder is a checkpoint once it has a manifest. No file names the latest checkpoint: it is the highest
step that has a valid manifest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import field, frozen
from torch import Tensor

from skyrl.checkpoint.manifest import FILE, Level, Manifest, StoredFile, damages, read_manifest
from skyrl.checkpoint.names import STEP_FOLDER, name_of
from skyrl.checkpoint.shards import StoredTensors, TensorShard, write_shards
from skyrl.errors import ResumeError, RunError
from skyrl.storage.disk import Disk, Storage, digest_of, readable, remedy
from skyrl.storage.places import storage_at

STATE = "state.json"
_UNFINISHED, _REMOVED = ".unfinished_", ".removed_"

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Checkpoint:
    """A checkpoint: the state of a run after a step."""

    step: int
    models: Mapping[str, Mapping[str, Tensor]] = field(repr=False)
    """Tensors by name, for `policy` and every other trained model. A loaded checkpoint has `StoredTensors`."""

    state: Mapping[str, Any]
    config: Mapping[str, Any] = field(repr=False)
    """`cattrs.unstructure` of the resolved configuration."""

    fingerprint: str
    derived: Sequence[str] = ()
    """Dotted paths of the configuration values that rules filled in."""

    world_size: Mapping[str, int] = {}
    """Number of ranks of each model."""

    metrics: Mapping[str, float] = field(default={}, repr=False)
    """Metrics of the step."""


@frozen(kw_only=True)
class Retention:
    """Which checkpoints are kept: the newest, those at a fixed interval, and the best. A step is kept if any rule says
    so. -1 for `last` keeps everything; -1 for the others adds nothing.
    """

    last: int = -1
    """Number of the newest checkpoints to keep, at least 1."""

    every: int = -1
    """Interval, in steps, of checkpoints that are kept permanently."""

    best: int = -1
    """Number of checkpoints with the best `metric` to keep; a tie is won by the newer one."""

    metric: str | None = None
    """Name of the metric that ranks checkpoints. A step without this metric is never among the best."""

    larger_is_better: bool = True

    def steps_to_keep(self, steps: Sequence[int], values: Mapping[int, float] = {}) -> set[int]:
        """The subset of `steps` to keep, which always contains the newest; `values` are values of `metric` by step."""
        ascending = sorted(steps)
        if self.last == -1:
            return set(ascending)
        kept = set(ascending[-max(self.last, 1) :])
        if self.every > 0:
            kept |= {step for step in ascending if step % self.every == 0}
        if self.best > 0:
            sign = 1 if self.larger_is_better else -1
            kept |= set(
                sorted(values.keys() & set(ascending), key=lambda step: (sign * values[step], step))[-self.best :]
            )
        return kept


class CheckpointStore:
    """The checkpoints of one run. Only one process at a time may save."""

    def __init__(self, folder: Path | str, keep: int | Retention = -1, *, verify: Level = "digest") -> None:
        """`folder` is a path or an address such as `s3://bucket/run`. `keep` is a `Retention`, or the number of newest
        checkpoints to keep. `verify` is the check that a checkpoint must pass when it is loaded, and that a new one
        must pass before older ones are deleted.
        """
        self.storage: Storage = storage_at(folder)
        self.folder = self.storage.where
        self._keep = keep if isinstance(keep, Retention) else Retention(last=keep)
        self._verify: Level = verify

    def save(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint from this process, make it durable, then make it visible. Returns its address.

        Raises `RunError` if it cannot be written; earlier checkpoints are then unchanged.
        """
        need = sum(tensor.nbytes for tensors in checkpoint.models.values() for tensor in tensors.values())
        folder = self.begin(checkpoint.step, need)
        files = []
        with self.saving(checkpoint.step, need):
            for model, tensors in checkpoint.models.items():
                shards = [TensorShard.from_full_tensor(name, tensor.detach().cpu()) for name, tensor in tensors.items()]
                files.append(write_shards(shards, self.storage, folder, file_of_rank(model)))
        return self.finish(checkpoint, files, need)

    def begin(self, step: int, need: int = 0) -> str:
        """The empty folder into which the files of a checkpoint are written; `need` is their total size in bytes.

        Raises `RunError` if there is no room for them.
        """
        folder = self._place_of(step)
        with self.saving(step, need):
            self._clean_up(folder)
            room = self.storage.room()
            if room is not None and need > room:
                raise OSError("there is not enough free space")
        return folder

    def finish(self, checkpoint: Checkpoint, files: Sequence[StoredFile], need: int = 0) -> str:
        """Write state and manifest beside `files`, which are in the folder that `begin` named, and make the checkpoint
        visible. Then delete the checkpoints that retention no longer keeps.

        `models` of the checkpoint are not read. Raises `RunError`.
        """
        step, folder = checkpoint.step, self._place_of(checkpoint.step)
        with self.saving(step, need):
            content = [json.dumps({**checkpoint.state}, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"]
            self.storage.write(f"{folder}/{STATE}", content)
            state = StoredFile(name=STATE, size=len(content[0]), digest=digest_of(content))
            described = {name: getattr(checkpoint, name) for name in _DESCRIBED}
            manifest = Manifest(files=(*files, state), **described)
            self.storage.write(f"{folder}/{FILE}", [manifest.content()])
            for inner in sorted({file.name.rpartition("/")[0] for file in manifest.files} - {""}):
                self.storage.flush(f"{folder}/{inner}")
            self.storage.flush(folder)
            if self.storage.moves:
                self._put_aside(step)  # the same step, saved before the run resumed from an earlier one
                self.storage.move(folder, name_of(step))
        self._forget_old(step)
        return self._location(step)

    @contextmanager
    def saving(self, step: int, need: int = 0) -> Iterator[None]:
        """Turns an `OSError` of the block into a `RunError` that states the needed and the free space."""
        try:
            yield
        except (OSError, RunError) as error:  # a rank that writes its file raises `RunError`
            ours = isinstance(error, RunError)
            message = "" if ours else could_not_write(self.storage, self._location(step), error, need)
            with suppress(OSError):  # the unfinished checkpoint may be what fills the disk
                self.storage.remove(self._place_of(step))
            if ours:
                raise
            raise RunError(message) from error

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in ascending order, damaged ones included. Raises `ResumeError`."""
        try:
            matches = (STEP_FOLDER.fullmatch(name) for name in self.storage.names())
            steps = sorted(int(name[1]) for name in matches if name)
            if self.storage.moves:
                return steps
            return [step for step in steps if FILE in self.storage.names(name_of(step))]
        except OSError as error:
            raise ResumeError(f"the content of {self.folder} cannot be listed: {error}") from error

    def load(self, step: int) -> Checkpoint:
        """The verified checkpoint of a step. Raises `ResumeError`, which names the file that is missing or damaged."""
        return load_checkpoint(self._location(step), self._verify)

    def latest(self, *, fall_back: Callable[[str], None] | None = None) -> Checkpoint | None:
        """The newest checkpoint, or None if there is none. Raises `ResumeError`, which names the file that is damaged.

        With `fall_back`, the newest intact checkpoint: `fall_back` is called with one line for each damaged one. Raises
        if none is intact.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.load(step)
            except ResumeError as error:
                if fall_back is None or step == steps[0]:
                    raise
                fall_back(f"{error}; falling back to the checkpoint before it")
        return None

    def verify(self, step: int, level: Level = "digest") -> list[str]:
        """Damages of a checkpoint, one line for each damaged file; empty if it is intact."""
        try:
            manifest = self.manifest(step)
        except ResumeError as error:
            return [str(error)]
        return list(damages(self.storage, name_of(step), manifest, level))

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step. Raises `ResumeError`."""
        return read_manifest(self.storage, name_of(step))

    def _clean_up(self, folder: str) -> None:
        """Delete unfinished checkpoints of killed processes, and folders whose deletion failed before."""
        for name in self.storage.names():
            complete = self.storage.moves or not STEP_FOLDER.fullmatch(name) or FILE in self.storage.names(name)
            if name.startswith((_UNFINISHED, _REMOVED)) or not complete:
                self._remove(name)
        if not self.storage.moves:
            self._delete(folder)

    def _forget_old(self, newest: int) -> None:
        steps = [step for step in self.steps() if step <= newest]
        kept = self._keep.steps_to_keep(steps, self._values(steps))
        old = [step for step in steps if step not in kept]
        if not old:
            return
        for damage in self.verify(newest, self._verify):
            raise RunError(f"{damage}, although it was just saved: no older checkpoint was deleted")
        for step in old:
            try:
                self._put_aside(step)
            except OSError as error:
                _log.warning("%s cannot be deleted, will retry later: %s", self._location(step), error)

    def _put_aside(self, step: int) -> None:
        """Delete a checkpoint, in an order in which a partly deleted one never looks whole."""
        name = name_of(step)
        if name not in self.storage.names():
            return
        if self.storage.moves:
            aside = _REMOVED + name
            self.storage.remove(aside)
            self.storage.move(name, aside)
            self._remove(aside)
        else:
            self._delete(name)

    def _delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first: without it an object store's folder is no checkpoint."""
        self.storage.remove(f"{name}/{FILE}")
        self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self.storage.remove(name)
        except OSError as error:
            _log.warning("%s/%s cannot be deleted, will retry later: %s", self.folder, name, error)

    def _values(self, steps: Sequence[int]) -> dict[int, float]:
        """Values of the metric that ranks checkpoints, by step."""
        if self._keep.metric is None or self._keep.best <= 0:
            return {}
        values = {}
        for step in steps:
            with suppress(ResumeError):
                metrics = self.manifest(step).metrics
                if self._keep.metric in metrics:
                    values[step] = metrics[self._keep.metric]
        return values

    def _place_of(self, step: int) -> str:
        return _UNFINISHED + name_of(step) if self.storage.moves else name_of(step)

    def _location(self, step: int) -> str:
        return f"{self.folder}/{name_of(step)}"


_DESCRIBED = ("step", "config", "fingerprint", "derived", "world_size", "metrics")


def load_checkpoint(folder: Path | str, verify: Level = "digest") -> Checkpoint:
    """The checkpoint in a `global_step_N` folder. Raises `ResumeError`, which names the missing or damaged file."""
    parent, _, name = str(folder).rstrip("/").rpartition("/")
    storage = storage_at(parent or ".")
    try:
        stored = storage.names(name)
    except OSError as error:
        raise ResumeError(f"{folder} cannot be read: {error}") from error
    if not stored:
        raise ResumeError(f"there is no checkpoint folder {folder}")
    manifest = read_manifest(storage, name)
    for damage in damages(storage, name, manifest, verify):
        raise ResumeError(damage)
    models: dict[str, list[str]] = {}
    for file in manifest.files:
        model, _, rank = file.name.partition("/")
        if rank:
            models.setdefault(model, []).append(file.name)
    return Checkpoint(
        models={model: StoredTensors(storage, name, tuple(files)) for model, files in models.items()},
        state=_state(storage, name, manifest),
        **{item: getattr(manifest, item) for item in _DESCRIBED},
    )


def _state(storage: Storage, folder: str, manifest: Manifest) -> dict[str, Any]:
    where = f"{storage.where}/{folder}/{STATE}"
    if all(file.name != STATE for file in manifest.files):
        raise ResumeError(f"{where} is not in the manifest")
    try:
        state = json.loads(storage.read(f"{folder}/{STATE}"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResumeError(f"{where} cannot be read: {type(error).__name__}") from error
    if not isinstance(state, dict):
        raise ResumeError(f"{where} is not what a run writes: it is not a table")
    return state


def file_of_rank(model: str, rank: int = 0, size: int = 1) -> str:
    """Name of the file that holds one rank's shards of a model."""
    return f"{model}/rank_{rank}_of_{size}.safetensors"


def could_not_write(storage: Storage, where: str, error: Exception, need: int) -> str:
    """Message for a checkpoint that could not be written."""
    reason = getattr(error, "strerror", None) or str(error)
    message = f"the checkpoint {where} cannot be written: {reason}"
    if need:
        with suppress(OSError):
            room = storage.room()
            message += f"; it needs {readable(need)}" + (f", and {readable(room)} are free" if room is not None else "")
    if isinstance(storage, Disk) and isinstance(error, OSError) and error.errno:
        message += f"; {remedy(error.errno, storage.path)}"
    return f"{message}. The checkpoints before it are intact"


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with finite values, the only ones that a manifest can store."""
    return {name: value for name, value in metrics.items() if abs(value) < float("inf")}
