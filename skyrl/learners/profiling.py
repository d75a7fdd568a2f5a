"""Traces of optimizer steps by torch.profiler: operators with their shapes and memory, and the kernels of a GPU.

profile/step_3/policy-0-update_1.json.gz            a Chrome trace
profile/step_3/policy-0-update_1-memory.txt         operators by the memory that they allocate (`record_memory`)
profile/step_3/policy-0-update_1-memory.pickle      on CUDA: every allocation, for pytorch.org/memory_viz
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from skyrl.errors import RunError

MOST_ALLOCATIONS = 1_000_000
"""Largest number of allocations that a memory snapshot records."""


class UpdateProfiler:
    """Writes a Chrome trace of each update of one rank, its passes and its optimizer step, while a folder is set."""

    def __init__(self, name: str, *, record_memory: bool = False) -> None:
        """`name` is the name of the process, such as `policy-0`; `record_memory` also writes memory profiles."""
        self._name, self._record_memory = name, record_memory
        self._folder: Path | None = None
        self._count = 0
        self._begun: ExitStack | None = None  # the trace of the update under way

    def write_to(self, folder: Path | None) -> None:
        """Trace the steps from now on into `folder`. None stops tracing."""
        self._folder, self._count = folder, 0

    @contextmanager
    def part(self, *, last: bool = False) -> Iterator[None]:
        """A context around one part of an update, whose work is done in this thread; the trace is written after the
        `last`. Raises `RunError` if it cannot be written.
        """
        with self._begun or ExitStack() as trace:
            if self._begun is None and self._folder is not None:
                trace.enter_context(self._traced(self._folder))
            self._begun = None
            yield
            if not last:
                self._begun = trace.pop_all()

    @contextmanager
    def _traced(self, folder: Path) -> Iterator[None]:
        self._count += 1
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with ExitStack() as recording:
            if self._record_memory and torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
                recording.callback(torch.cuda.memory._record_memory_history, enabled=None)
            with profile(activities=[ProfilerActivity.CPU, *devices], record_shapes=True, profile_memory=True) as trace:
                yield
            try:
                self._write(trace, folder / f"{self._name}-update_{self._count}")
            except (OSError, RuntimeError) as error:
                raise RunError(f"the trace of an update cannot be written to {folder}: {error}") from error
            finally:
                del trace
                gc.collect()  # the trace holds references to weights, which would keep them on the device

    def _write(self, trace: profile, path: Path) -> None:
        """Write the files whose names begin with `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(f"{path}.json.gz")
        if not self._record_memory:
            return
        by = "self_device_memory_usage" if torch.cuda.is_available() else "self_cpu_memory_usage"
        table = trace.key_averages(group_by_input_shape=True).table(sort_by=by, row_limit=100)
        Path(f"{path}-memory.txt").write_text(table, encoding="utf-8")
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{path}-memory.pickle")
