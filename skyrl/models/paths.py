"""Locations of models: a local folder or the Hugging Face hub. Imports no torch, so that a bad path is reported at
once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_INDEX = "model.safetensors.index.json"


def local_folder(path: str) -> Path | None:
    """The folder that `path` names, `~` expanded, or None for a hub name: `owner/name`, and no such folder here."""
    folder = Path(path).expanduser()
    return None if _HUB_NAME.fullmatch(path) and not folder.is_dir() else folder


def check_model_path(path: str) -> str | None:
    """A sentence on why no model can be loaded from `path`, or None. A hub name passes: only loading can find out."""
    folder = local_folder(path)
    if folder is None:
        return None
    if not folder.is_dir():
        return f"there is no model folder {path} (and a hub name has the form owner/name)"
    if not (folder / "config.json").is_file():
        return f"the folder {path} holds no config.json, so it is not a Hugging Face model"
    return _missing_weights(folder, path)


def _missing_weights(folder: Path, path: str) -> str | None:
    """An index names the files that the weights are spread over; without one, any safetensors file will do."""
    index = folder / _INDEX
    if not index.is_file():
        found = any(folder.glob("*.safetensors"))
        return None if found else f"the folder {path} holds no weights in safetensors, the only format that is read"
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_INDEX} in {path} is damaged: copy the model again"
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        return f"the folder {path} lacks {len(missing)} of its {len(files)} weight files, such as {missing[0]}"
    return None
