"""Datasets that Hugging Face's library reads: folders that it saved, folders of data files, and names on the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl.errors import DataError


def read_dataset(source: str) -> Iterator[Mapping[str, Any]]:
    """The rows of `name`, `name:split` or `name:configuration:split`; a name is a folder, or `owner/name` on the hub.

    Raises `DataError` for what is neither, and for what cannot be loaded.
    """
    name, configuration, split = _parts(source)
    folder = Path(name).expanduser()
    if not folder.is_dir() and ("/" not in name or name.startswith((".", "/", "~"))):
        raise DataError(
            f"{source} is neither a .parquet, .jsonl or .json file nor a folder nor a hub dataset (owner/name or "
            "owner/name:split)"
        )
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source} is a dataset of Hugging Face: reading it needs `pip install skyrl[data]`") from None
    try:
        if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(folder))
            rows = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            rows = datasets.load_dataset(str(folder) if folder.is_dir() else name, configuration, split=split)
    except Exception as error:  # the library's own, those of its readers, and those of the network
        said = f"there is no split {split!r}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"the dataset {source} cannot be loaded: {said}") from error
    yield from rows


def _parts(source: str) -> tuple[str, str | None, str]:
    match source.split(":"):
        case [name]:
            return name, None, "train"
        case [name, split]:
            return name, None, split
        case [name, configuration, split]:
            return name, configuration, split
    raise DataError(f"{source}: a dataset is `name`, `name:split` or `name:configuration:split`")
