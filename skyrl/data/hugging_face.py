"""Datasets read with Hugging Face's library: folders that it saved, folders of data files, and names on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os.path import isdir, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl.data.data_files import FILES
from skyrl.errors import DataError
from skyrl.hub import HUB_NAME, hub_failure, similar_path_hint
from skyrl.installation import install_command

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset

SPLIT = "train"
"""The split that is read if none is named."""

_SOURCE = re.compile(r"(?P<name>[^:]*)(?::(?P<configuration>[^:\[\]]*))??(?::(?P<split>[^:\[\]]+(?:\[[^\[\]]*\])?))?")
"""Parts of a source. A slice of a split, such as train[:100] or train[10%:20%], contains a colon, too."""


def read_dataset(source: str) -> Iterator[Mapping[str, Any]]:
    """The rows of `name`, `name:split` or `name:configuration:split`; a name is a folder, or `owner/name` on the hub.

    A split may be sliced as in Hugging Face's library: `name:train[:100]`, `name:test[10%:]`. Raises `DataError` if the
    name is neither, or cannot be loaded.
    """
    yield from _dataset(source)


def streamed_dataset(source: str) -> IterableDataset:
    """The same rows, read while they are asked for: nothing is downloaded before, and there is no random access."""
    split = _parts(source)[2]
    if split and "[" in split:
        raise DataError(f"{source}: a slice of a split cannot be streamed; name the whole split, or do not stream")
    return _dataset(source, streaming=True)


def dataset_fingerprint(source: str) -> str:
    """The library's fingerprint of the rows, which changes with them. Raises `DataError` as `read_dataset` does."""
    return str(_dataset(source)._fingerprint)


def dataset_failure(source: str) -> str | None:
    """The reason why a folder or hub name cannot be a dataset, in a sentence; None if no reason is found. The hub is
    asked once. Raises `DataError` for a malformed name.
    """
    name, _, _ = _parts(source)
    if isdir(Path(name).expanduser()):
        return None
    if isfile(Path(source).expanduser()):
        return f"{source} is no file of rows that can be read: the names of these end in {', '.join(FILES)}"
    if not HUB_NAME.fullmatch(name):
        return (
            f"{source} is neither a .parquet, .arrow, .jsonl, .json or .csv file nor a folder nor a hub dataset "
            f"(owner/name or owner/name:split){similar_path_hint(name)}"
        )
    reason = hub_failure(name, "dataset")
    return (
        reason
        and f"the dataset {source} cannot be loaded: there is no such folder here{similar_path_hint(name)}, and "
        f"{reason}"
    )


def _dataset(source: str, *, streaming: bool = False) -> Dataset | IterableDataset:
    """The library's dataset, whose rows stay on disk; with `streaming`, its `IterableDataset`. Raises `DataError`."""
    name, configuration, split = _parts(source)
    folder = Path(name).expanduser()
    if reason := dataset_failure(source):
        raise DataError(reason)
    try:
        import datasets
    except ImportError:
        command = install_command("data")
        raise DataError(f"{source} is a dataset of Hugging Face: reading it needs `{command}`") from None
    try:
        if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
            stored = _slice(datasets.load_from_disk(str(folder)), split)
            return stored.to_iterable_dataset() if streaming else stored
        path = str(folder) if folder.is_dir() else name
        return datasets.load_dataset(path, configuration, split=split or SPLIT, streaming=streaming)
    except Exception as error:  # errors of the library, of its readers, and of the network
        raise DataError(f"the dataset {source} cannot be loaded: {error}") from error


def _slice(stored: Dataset | DatasetDict, split: str | None) -> Dataset:
    """The split of a stored dataset, which has several splits, or one that may have no name. Raises `ValueError`."""
    import datasets

    several = isinstance(stored, datasets.DatasetDict)
    if split is None and not several:
        return stored
    spec = split or SPLIT
    base = spec.partition("[")[0]
    result = stored.get(base) if several else stored
    names = list(stored) if several else [str(stored.split or SPLIT)]
    if result is None or base not in names:
        raise ValueError(f"there is no split {base!r}; it has {', '.join(names)}")
    (part,) = datasets.ReadInstruction.from_spec(spec).to_absolute({base: len(result)})
    return result.select(range(part.from_ or 0, len(result) if part.to is None else part.to))


def _parts(source: str) -> tuple[str, str | None, str | None]:
    match = _SOURCE.fullmatch(source)
    if match is None or not match["name"]:
        raise DataError(f"{source}: a dataset is `name`, `name:split` or `name:configuration:split`")
    return match["name"], match["configuration"] or None, match["split"]
