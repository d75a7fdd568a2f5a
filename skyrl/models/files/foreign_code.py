"""Refuses models whose configuration requests code, before transformers reads it.

transformers fetches native kernels from the hub for an attention implementation named `owner/repository`, whatever
implementation its caller requests; settings that it marks as internal, and code named in nested tables, bypassed
`trust_remote_code` in several of its versions (CVE-2026-4372, CVE-2026-5241).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from skyrl.errors import ModelError
from skyrl.models.files.paths import large_text_failure
from skyrl.tree.files import stored_text

_FILES = ("config.json", "generation_config.json")


def refuse_foreign_code(source: str) -> None:
    """Looks through the configuration files of a folder or hub name. Raises `ModelError` with the file and the key."""
    folder = Path(source)
    if folder.is_dir():
        for name in _FILES:
            _refuse(folder / name)
    else:
        _refuse_on_the_hub(source)


@cache
def _refuse_on_the_hub(source: str) -> None:
    if reason := large_text_failure(source):
        raise ModelError(reason)
    for name in _FILES:
        try:
            file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        except Exception:  # noqa: BLE001 - the function that loads it next reports the fault
            return
        if file is not None:
            _refuse(Path(file))


def _refuse(file: Path) -> None:
    try:
        content = json.loads(stored_text(file))
    except (OSError, ValueError, RecursionError):  # the function that loads it next reports the fault
        return
    for key, reason in _asking(content, ""):
        raise ModelError(
            f"{file} would load code from elsewhere: {key} {reason}. If you trust the model, delete the key in a copy "
            "of it"
        )


def _asking(content: object, prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted key of each setting that would run code, and the reason for refusing it."""
    if isinstance(content, list):
        for number, item in enumerate(content):
            yield from _asking(item, f"{prefix}{number}.")
    if not isinstance(content, dict):
        return
    for key, value in content.items():
        if key.endswith("_internal"):
            yield prefix + key, "is an internal setting of transformers"
        elif key.endswith("_implementation") and any("/" in text for text in _texts(value)):
            yield prefix + key, f"= {value!r} names a repository of kernels"
        elif key == "auto_map" and (prefix or not _is_known(content) or any("--" in text for text in _texts(value))):
            yield prefix + key, "names classes that are not those of transformers"
        else:
            yield from _asking(value, f"{prefix}{key}.")


def _is_known(config: dict[str, Any]) -> bool:
    """Whether transformers has its own class for the model, so that it ignores `auto_map`."""
    return config.get("model_type") in CONFIG_MAPPING


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
