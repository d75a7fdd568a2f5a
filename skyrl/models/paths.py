"""Where a model may live: a local folder or the Hugging Face hub. Imports no torch, so that a bad path is told at once."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(path: str) -> Path | None:
    """The local folder that `path` names, or None for a hub name."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    return None if _HUB_NAME.fullmatch(path) else folder


def check_model_path(path: str) -> str | None:
    """One sentence on why no model can be loaded from `path`, or None. A hub name passes: only loading can tell."""
    folder = local_folder(path)
    if folder is None:
        return None
    if not folder.is_dir():
        return f"there is no model folder {path} (and a hub name has the form owner/name)"
    if not (folder / "config.json").is_file():
        return f"the folder {path} holds no config.json, so it is not a Hugging Face model"
    if not any(folder.glob("*.safetensors")):
        return f"the folder {path} holds no weights in safetensors"
    return None
