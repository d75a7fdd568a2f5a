"""Locations of models, a local folder or the Hugging Face hub, and checks that a folder is complete. Does not import
torch, so that a bad path is reported at once.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from skyrl.hub import HUB_NAME, hub_failure, large_text, similar_path_hint
from skyrl.tree.files import MOST_STORED, stored_text

_TEXTS = frozenset({".json", ".jinja", ".txt"})

INDEX = "model.safetensors.index.json"
"""Name of the file that lists the files of a model's weights."""


def local_folder(path: str) -> Path | None:
    """The folder that `path` names, `~` expanded, or None for a hub name: `owner/name` if no such folder exists."""
    folder = Path(path).expanduser()
    return None if HUB_NAME.fullmatch(path) and not folder.is_dir() else folder


def check_model_path(path: str, *, weights: bool = True) -> str | None:
    """A sentence on why no model can be loaded from `path`, or None. A hub name passes, since only loading can check
    it. Without `weights` a configuration suffices.
    """
    folder = local_folder(path)
    if folder is None:
        return None
    if not folder.is_dir():
        if folder.is_file():
            return f"{path} is a file, but a model is a folder in Hugging Face format, or a hub name: owner/name"
        return f"there is no model folder {path}{similar_path_hint(path)}, and a hub name has the form owner/name"
    if reason := _unbounded(folder):
        return reason
    if not (folder / "config.json").is_file():
        return f"the folder {path} contains no config.json, so it is not a Hugging Face model"
    return _missing_weights(folder, path) if weights else None


def model_failure(path: str, *, weights: bool = True) -> str | None:
    """A sentence on why no model can be loaded from a folder or hub name, or None. Asks the hub once. Without `weights`
    a configuration suffices.
    """
    reason = check_model_path(path, weights=weights)
    if reason or local_folder(path) is not None:
        return reason
    return _hub_failure("model", path)


def tokenizer_failure(path: str) -> str | None:
    """A sentence on why no tokenizer can be loaded from a folder or hub name, or None. Asks the hub once."""
    folder = local_folder(path)
    if folder is None:
        return _hub_failure("tokenizer", path)
    if not folder.is_dir():
        return f"there is no tokenizer folder {path}{similar_path_hint(path)}, and a hub name has the form owner/name"
    return _unbounded(folder)


def _hub_failure(kind: str, path: str) -> str | None:
    if (reason := hub_failure(path)) is None:
        return None
    return f"the {kind} {path} cannot be loaded: there is no such folder here{similar_path_hint(path)}, and {reason}"


def _unbounded(folder: Path) -> str | None:
    """A sentence on a file that takes too long to read, if there is one: a pipe or a device, or a text that is larger
    than any model's. Weights may have any size.
    """
    for name in sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else ():
        file = folder / name
        try:
            status = file.stat()
        except OSError:
            continue  # a link that leads nowhere
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            return f"{file} is a pipe or a device, which may never end: remove it from the model's folder"
        if file.suffix in _TEXTS and status.st_size > MOST_STORED:
            return _size_message(file, "copy the model again")
    return None


def large_text_failure(name: str) -> str | None:
    """A sentence on a text of a model on the hub that is larger than any model's, or None. Asks the hub for a list."""
    large = large_text(name, _TEXTS)
    return None if large is None else _size_message(f"{name}/{large}", "it is not downloaded; use another copy of it")


def _size_message(file: object, remedy: str) -> str:
    return f"{file} is larger than {MOST_STORED >> 20} MiB, which no text of a model is: {remedy}"


def weight_files(folder: Path) -> set[str]:
    """Names of the files of a model's weights: those of its index or, without one, all safetensors files. Raises
    `ValueError` if the index is damaged.
    """
    index = folder / INDEX
    if not index.is_file():
        return {file.name for file in folder.glob("*.safetensors")}
    try:
        return set(json.loads(stored_text(index))["weight_map"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} names no files") from error


def _missing_weights(folder: Path, path: str) -> str | None:
    """A sentence on missing weights, or None."""
    try:
        files = weight_files(folder)
    except ValueError:
        return f"{INDEX} in {path} is damaged: copy the model again"
    if not files:
        return f"the folder {path} contains no weights in safetensors, the only supported format"
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        return f"the folder {path} lacks {len(missing)} of its {len(files)} weight files, such as {missing[0]}"
    damaged = (f"{name} {reason}" for name in sorted(files) if (reason := _broken_weights_reason(folder / name)))
    first = next(damaged, None)
    return (
        first and f"the model {path} cannot be loaded: its weights are damaged or incomplete ({first}): copy them again"
    )


def _broken_weights_reason(file: Path) -> str | None:
    """Why a file cannot hold weights: it is copied in part, or a pointer of Git LFS. None if it can.

    A safetensors file is the length of its header in 8 bytes, the header as JSON, and the tensors.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start.startswith(b"version "):
            return "is a Git LFS pointer, not the weights themselves"
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            return f"has {size} bytes and no header of weights"
        try:
            header = json.loads(opened.read(length))
            ends = [int(item["data_offsets"][1]) for name, item in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return "has a damaged header"
    full_size = 8 + length + max(ends, default=0)
    return f"has {size} of its {full_size} bytes" if size < full_size else None
