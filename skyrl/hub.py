"""Checks names on the Hugging Face hub once and with a deadline, before a library uses them: libraries retry for
minutes.

Imports `huggingface_hub` alone, and honours its environment variables: HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME,
HF_HUB_ETAG_TIMEOUT.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from skyrl.tree.files import MOST_STORED
from skyrl.tree.names import nearest

Kind = Literal["model", "dataset"]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Repository on the hub: `owner/name`."""

_SHOWN = 5
"""Number of names of a folder that a message lists."""

DEADLINE = 3.0
"""Seconds that the hub has to answer, unless HF_HUB_ETAG_TIMEOUT gives another number."""


@cache
def hub_failure(name: str, kind: Kind = "model", deadline: float | None = None) -> str | None:
    """The reason why this machine cannot get `name` from the hub, as the end of a sentence; None if it can, or if a
    copy is in the cache. `deadline` is in seconds. Each name is asked for once per process.
    """
    from huggingface_hub import constants

    if cached_folder(name, kind) is not None:
        return None
    if constants.is_offline_mode():
        return (
            f"HF_HUB_OFFLINE is set, so the hub cannot be reached, and the cache {constants.HF_HUB_CACHE} has no "
            "copy: download it where there is a network"
        )
    seconds = deadline or float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or DEADLINE)
    answer: SimpleQueue[Exception | None] = SimpleQueue()
    threading.Thread(target=lambda: answer.put(_request_error(name, kind, seconds)), daemon=True).start()
    try:
        error = answer.get(timeout=seconds)  # resolving a host name has no timeout
    except Empty:
        return _unreachable(f"gave no answer within {seconds:g} s")
    return None if error is None else _describe_error(error)


def large_text(name: str, suffixes: Collection[str]) -> str | None:
    """Name of a text of a model on the hub that is too large to be read (`MOST_STORED`), by the hub's own list, so that
    it is not downloaded; None if there is none, if a copy is in the cache, or if the hub does not list its files.
    `suffixes` are those of texts.
    """
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode() or cached_folder(name) is not None:
        return None
    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=DEADLINE).siblings or ()
    except Exception:  # noqa: BLE001 - errors of the client and of the network below it; a download reports them
        return None
    texts = (file for file in files if Path(file.rfilename).suffix in suffixes)
    return next((text.rfilename for text in texts if (text.size or 0) > MOST_STORED), None)


def cached_folder(name: str, kind: Kind = "model") -> Path | None:
    """The newest copy of the hub's repository on this machine: a model's files, or the folder of a dataset."""
    from huggingface_hub import constants, try_to_load_from_cache

    if kind == "model":
        config_file = try_to_load_from_cache(name, "config.json")
        return Path(config_file).parent if isinstance(config_file, str) else None
    owner, _, rest = name.partition("/")
    datasets = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    copies = (Path(constants.HF_HUB_CACHE) / f"datasets--{owner}--{rest}", Path(datasets) / f"{owner}___{rest.lower()}")
    return next((folder for folder in copies if folder.is_dir()), None)


def _request_error(name: str, kind: Kind, seconds: float) -> Exception | None:
    """Send the request once; return the exception that it raises, or None."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    try:
        if kind == "model":
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=seconds)
        else:
            HfApi().dataset_info(name, timeout=seconds)
    except Exception as error:  # noqa: BLE001 - errors of the client and of the network below it
        return error
    return None


def _describe_error(error: Exception) -> str:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "its authors ask for consent: accept their terms on its page and log in with `hf auth login`"
        case errors.RepositoryNotFoundError() | errors.HFValidationError():
            return "the hub has nothing of this name that this account can see (for private ones, run `hf auth login`)"
        case errors.EntryNotFoundError():
            return "the hub has it, but without a config.json, so it is not a transformers model"
    first = str(error).strip().partition("\n")[0]
    return _unreachable(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def _unreachable(reason: str) -> str:
    from huggingface_hub import constants

    return (
        f"the hub cannot be reached to fetch it ({constants.ENDPOINT}: {reason}). Download it first, set HF_ENDPOINT "
        "to a mirror, or set HF_HUB_OFFLINE = 1 if the cache has a copy"
    )


def similar_path_hint(path: str) -> str:
    """A suggestion for a path that does not exist, in brackets: a similar name in its folder, or what the folder holds.
    Empty if the folder does not exist either.
    """
    expanded_path = Path(path).expanduser()
    try:
        names = sorted(item.name for item in expanded_path.parent.iterdir() if not item.name.startswith("."))
    except OSError:
        return ""
    if near := nearest(expanded_path.name, names):
        return f" (did you mean {expanded_path.parent / near}?)"
    listing = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f" ({expanded_path.parent} contains {listing or 'nothing'})"
