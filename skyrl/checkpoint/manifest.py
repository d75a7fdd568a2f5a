"""The manifest of a checkpoint: its files with their sizes and digests, and the run that wrote it. It is written last.

    {"format": 1, "step": 40, "files": {"policy/rank_0_of_2.safetensors": {"size": ..., "xxh3_128": "..."}, ...},
     "world_size": {"policy": 2}, "versions": {...}, "metrics": {...}, "schema_version": ..., "fingerprint": "...",
     "config": {...}, "digest": "..."}

`config` is `cattrs.unstructure` of the resolved tree, so that a manifest is also a stored configuration. `digest`
covers all other fields in their canonical JSON form, the one in which they are written: it detects accidental damage.
`check_body` also detects forged manifests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard

from attrs import field, frozen

from skyrl.checkpoint.names import step_of
from skyrl.errors import ResumeError
from skyrl.processes.machine_facts import installed_versions
from skyrl.storage.disk import Storage, digest_of
from skyrl.tree.dump import SCHEMA_VERSION

FILE = "manifest.json"
FORMAT = 1
"""Version of the layout of checkpoints. A reader refuses later ones."""

LARGEST_MANIFEST = 64 << 20

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

    versions: Mapping[str, str] = field(factory=lambda: installed_versions(("torch", "transformers", "safetensors")))
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
            elif level == "digest" and digest_of(storage.chunks(name, size)) != file.digest:
                yield f"{where} is damaged: its {size} bytes do not match the recorded digest"
        except FileNotFoundError:
            yield f"{where} is missing"
        except OSError as error:
            yield f"{where} cannot be read: {error}"


def _text(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "surrogatepass")


def check_body(body: Mapping[str, Any]) -> None:
    """Checks the types of a manifest's fields. Raises `ValueError`, or `KeyError` for a missing field."""
    _expect(is_count(body["step"]), "its step is not a non-negative integer")
    _expect(is_count(body["schema_version"]), "its schema_version is not a non-negative integer")
    _expect(isinstance(body["fingerprint"], str), "its fingerprint is not a string")
    _expect(isinstance(body["config"], dict), "its config is not a table")
    derived = body["derived"]
    _expect(
        isinstance(derived, list) and all(isinstance(item, str) for item in derived),
        "its derived is not a list of paths",
    )
    _expect(
        _maps(body["world_size"], lambda ranks: is_count(ranks) and ranks > 0),
        "its world_size is not a table of positive integers",
    )
    _expect(_maps(body["versions"], lambda version: isinstance(version, str)), "its versions are not strings")
    _expect(_maps(body["metrics"], _is_finite), "its metrics are not finite numbers")
    _expect(isinstance(body["files"], dict), "its files are not a table")
    for name, of in body["files"].items():
        safe = all(part not in ("", ".", "..") for part in name.split("/")) and not set(name) & {"\\", "\0"}
        _expect(safe and name != FILE, f"{name!r} is not the name of a file in the checkpoint")
        described = isinstance(of, dict) and is_count(of.get("size"))
        _expect(described, f"the size of {name} is not a non-negative integer")
        digest = of.get("xxh3_128")
        is_hexadecimal = isinstance(digest, str) and len(digest) == 32 and not set(digest) - set("0123456789abcdef")
        _expect(is_hexadecimal, f"the digest of {name} is not an xxh3-128 digest")


def is_count(value: object) -> TypeGuard[int]:
    """Whether the value is a non-negative integer."""
    return type(value) is int and value >= 0


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and type(value) in (int, float) and math.isfinite(value)


def _maps(value: object, to: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(to, value.values()))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
