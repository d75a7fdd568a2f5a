"""Modes of files that libraries write for their owner alone: they become what the umask gives any other file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def follow_umask(path: Path) -> None:
    """Give a file, or every file in a folder, the mode of a new file beside it: safetensors writes with mode 0600, and
    nobody else could load a model on a shared disk.
    """
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    probe = path / ".mode" if path.is_dir() else path.with_name(f".{path.name}.mode")
    probe.touch()  # reading the umask itself would set it for a moment, for all threads
    mode = probe.stat().st_mode
    probe.unlink(missing_ok=True)
    for file in files:
        with suppress(OSError):  # file systems without modes
            file.chmod(mode & 0o777)


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name as safetensors, as `safetensors.torch.save_file` does, with the umask's mode."""
    from safetensors.torch import save_file

    save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    follow_umask(file)
