"""The manifest of a checkpoint: its files with their sizes and digests, and the run that wrote it. It is written last.

    {"format": 1, "step": 40, "files": {"policy/rank_0_of_2.safetensors": {"size": ..., "xxh3_128": "..."}, ...},
     "world_size": {"policy": 2}, "versions": {...}, "metrics": {...}, "schema_version": ..., "fingerprint": "...",
     "config": {...}, "digest": "..."}

`config` is `cattrs.unstructure` of the resolved tree, so that a manifest is also a stored configuration. `digest`
covers all other fields in their canonical JSON form, the one in which they are written.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from attrs import field, frozen

from skyrl.checkpoint.names import step_of
from skyrl.checkpoint.validation import LARGEST_MANIFEST, check_body, is_count
from skyrl.errors import ResumeError
from skyrl.installation import __version__
from skyrl.storage.disk import Storage, digest_of
from skyrl.tree.dump import SCHEMA_VERSION

FILE = "manifest.json"
FORMAT = 1
"""Version of the layout of checkpoints. A reader refuses later ones."""

Level = Literal["digest", "size"]
"""Extent of a comparison with the manifest: every byte, or only that files exist with their length."""


@frozen(kw_only=True)
class StoredFile:
    """Name, size and digest of a checkpoint's file, as it was written."""

    name: str
    size: int
    digest: str
    """xxh3-128, in hexadecimal."""


@frozen(kw_only=True)
class Manifest:
    """Contents of a checkpoint."""

    step: int
    files: Sequence[StoredFile] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    fingerprint: str
    derived: Sequence[str] = ()
    """Dotted paths of the configuration values that rules filled in."""

    world_size: Mapping[str, int] = {}
    """Number of ranks of each model."""

    metrics: Mapping[str, float] = field(default={}, repr=False)
    """Metrics of the step; non-finite ones are left out."""

    versions: Mapping[str, str] = field(factory=lambda: versions())
    """Versions of Python and the packages that wrote the checkpoint."""

    schema_version: int = SCHEMA_VERSION

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.size for file in self.files)

    def content(self) -> bytes:
        """The manifest as it is written."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "files": {file.name: {"size": file.size, "xxh3_128": file.digest} for file in self.files},
            "world_size": dict(self.world_size),
            "versions": dict(self.versions),
            "metrics": dict(self.metrics),
            "schema_version": self.schema_version,
            "fingerprint": self.fingerprint,
            "derived": list(self.derived),
            "config": self.config,
        }
        return _text(body | {"digest": digest_of([_text(body)])})


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest in a checkpoint's folder. Raises `ResumeError`, which names the file, unless it is intact."""
    name = f"{folder}/{FILE}"
    where = f"{storage.where}/{name}"
    try:
        if storage.size(name) > LARGEST_MANIFEST:
            raise ResumeError(f"{where} is damaged: no manifest is larger than {LARGEST_MANIFEST} bytes")
        content = bytes(storage.read(name))
    except FileNotFoundError:
        raise ResumeError(f"{where} is missing: without it the checkpoint cannot be verified") from None
    except OSError as error:
        raise ResumeError(f"{where} cannot be read: {error}") from error
    try:
        body = json.loads(content)
        digest = body.pop("digest")
        intact = digest == digest_of([_text(body)]) and content == _text(body | {"digest": digest})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ResumeError(f"{where} is damaged: its content differs from what was written")
    return _manifest(body, folder, where)


def _manifest(body: dict[str, Any], folder: str, where: str) -> Manifest:
    """Builds the manifest. Raises `ResumeError` if no run wrote it: a forged manifest can have the right digest."""
    try:
        if not is_count(body["format"]):
            raise ValueError("its format is not a non-negative integer")
        if body["format"] > FORMAT:
            raise ResumeError(f"{where} has format {body['format']}, but this version reads only up to {FORMAT}")
        check_body(body)
    except (ValueError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ResumeError(f"{where} is not what a run writes: {reason}") from None
    step = step_of(folder)
    if step is not None and step != body["step"]:
        raise ResumeError(
            f"{where} belongs to step {body['step']}: the folder was renamed or swapped; restore its name"
        )
    files = [StoredFile(name=name, size=of["size"], digest=of["xxh3_128"]) for name, of in body["files"].items()]
    names = ("step", "world_size", "versions", "metrics", "schema_version", "fingerprint", "derived", "config")
    return Manifest(files=files, **{name: body[name] for name in names})


def damages(storage: Storage, folder: str, manifest: Manifest, level: Level = "digest") -> Iterator[str]:
    """Damages of a checkpoint's files, one line for each damaged file."""
    for file in manifest.files:
        name = f"{folder}/{file.name}"
        where = f"{storage.where}/{name}"
        try:
            size = storage.size(name)
            if size != file.size:
                yield f"{where} is damaged: it has {size} bytes, and {file.size} were written"
            elif level == "digest" and digest_of(storage.chunks(name)) != file.digest:
                yield f"{where} is damaged: its {size} bytes do not match the recorded digest"
        except FileNotFoundError:
            yield f"{where} is missing"
        except OSError as error:
            yield f"{where} cannot be read: {error}"


def versions() -> dict[str, str]:
    """Versions of Python, this package, torch, transformers and safetensors."""
    result = {"python": platform.python_version(), "skyrl": __version__}
    for name in ("torch", "transformers", "safetensors"):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result


def _text(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "surrogatepass")
