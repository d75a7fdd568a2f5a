"""Traces of optimizer steps by torch.profiler: operators with their shapes and memory, and the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from skyrl.errors import RunError


class UpdateProfiler:
    """Writes a Chrome trace of each optimizer step of one rank, as long as it is given a folder."""

    def __init__(self, name: str) -> None:
        """`name` is that of the process, such as `policy-0`."""
        self._name = name
        self._folder: Path | None = None
        self._count = 0

    def write_to(self, folder: Path | None) -> None:
        """Trace the steps from now on into this folder. None: no more."""
        self._folder, self._count = folder, 0

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around one optimizer step, whose work is done in this thread. Raises `RunError` if the trace cannot be
        written.
        """
        folder = self._folder
        if folder is None:
            yield
            return
        self._count += 1
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *devices], record_shapes=True, profile_memory=True) as trace:
            yield
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(folder / f"{self._name}-update_{self._count}.json.gz"))
        except (OSError, RuntimeError) as error:
            raise RunError(f"the trace of an update cannot be written to {folder}: {error}") from error
