"""Decoding over pages: on CUDA, a step is one CUDA graph, which is recorded for a few numbers of rows and replayed.

A step of a small model launches hundreds of short kernels, which takes the host ten times as long as the device needs
for them; a graph launches them at once. It reads weights, pages, tokens and positions at fixed addresses. It is
recorded again if one of these moves: the pool of pages grows, or weights are not replaced in place. Steps of rows with
adapters are not recorded: their factors move whenever other adapters share the batch.

On other devices, which only tests use, a step is the same call without a recording.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from skyrl.inference.torch.fused_decoder import FusedDecoder
from skyrl.inference.torch.paged_attention import RowPages, paged_attention
from skyrl.inference.torch.paged_cache import PagedCache, PagePool, PageStorage

_log = logging.getLogger(__name__)

_PATIENCE = 64
"""Number of steps that use the graph of a larger number of rows before one of the right size is recorded."""

_RECORDING = threading.Lock()
"""One engine of the process records at a time."""


class PagedDecoder:
    """Decodes the rows of a `PagedCache`. One thread at a time may call it, in inference mode."""

    def __init__(self, fused: FusedDecoder, pool: PagePool) -> None:
        self._fused, self._pool = fused, pool
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        """Graph and logits by number of rows."""
        self._recorded: tuple[object, ...] | None = None
        """Storage and addresses of weights that the graphs read."""
        self._checked = False
        self._waited: Counter[int] = Counter()
        self._records = pool.device.type == "cuda"
        self._stream: Any = None
        self._memory: Any = None

    def new_cache(self) -> PagedCache:
        """An empty cache; the one before must not be used any more."""
        self._pool.user = None
        if self._pool.release(most_bytes=self._pool.kept_bytes):
            self._drop()
        return PagedCache(self._pool)

    def invalidate(self) -> None:
        """Must be called after weights were replaced: graphs stay if the addresses of all weights have."""
        self._checked = False

    def release(self) -> None:
        """Frees graphs, and pages that no row holds."""
        self._drop()
        self._pool.release()

    def decode(self, cache: PagedCache, starts: Tensor, *, recorded: bool = True) -> Tensor:
        """Logits (R, V) after the tokens in column `end` of the cache, whose keys and values are added there; valid
        until the next call. `starts` (R,) is each row's first column. Without `recorded`, no graph is used.
        """
        storage, rows, end = self._pool.storage, cache.window.rows, cache.window.end
        assert storage is not None
        storage.ids[:rows] = cache.tokens[:rows, 0, end]
        storage.positions[:rows] = end - starts
        if not (self._records and recorded):
            return self._logits(storage, padded(rows))[:rows]
        with torch.cuda.device(self._pool.device):
            return self._replayed(storage, padded(rows))[:rows]

    def _logits(self, storage: PageStorage, rows: int) -> Tensor:
        """One step of the first `rows` rows, padding included; nothing in it depends on a value on the host."""
        positions, page = storage.positions[:rows], storage.page
        pages = RowPages.of(storage.table[:rows], positions, page)
        page_index = positions // page
        slots = pages.table.gather(1, page_index.unsqueeze(1)).squeeze(1) * page + positions % page

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            kept = storage.states[layer]
            kept[0].flatten(0, 1).index_copy_(0, slots, keys)
            kept[1].flatten(0, 1).index_copy_(0, slots, values)
            return paged_attention(queries, kept[0], kept[1], pages)

        return self._fused.next_logits(storage.ids[:rows].unsqueeze(1), positions, attend)

    def _replayed(self, storage: PageStorage, rows: int) -> Tensor:
        if not self._checked or self._recorded is None or self._recorded[0] is not storage:
            read = (storage, self._fused.addresses())
            if read != self._recorded:
                self._drop()
                self._recorded = read
            self._checked = True
        chosen = self._chosen(rows)
        if chosen not in self._graphs:
            self._record(storage, chosen)
        if chosen not in self._graphs:
            return self._logits(storage, rows)
        graph, logits = self._graphs[chosen]
        graph.replay()
        return logits

    def _chosen(self, rows: int) -> int:
        """The number of rows whose graph computes this step. A graph for more rows does it until one of the right size
        is worth its recording.
        """
        larger = min((size for size in self._graphs if size > rows), default=None)
        if rows in self._graphs or larger is None:
            return rows
        self._waited[rows] += 1
        return larger if self._waited[rows] <= _PATIENCE else rows

    def _record(self, storage: PageStorage, rows: int) -> None:
        """Records a step. If that fails, all further steps are computed without graphs."""
        began, graph, current = time.perf_counter(), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        try:
            with _RECORDING, torch.cuda.stream(self._stream):
                self._stream.wait_stream(current)
                self._logits(storage, rows)  # kernels are loaded and workspaces allocated before the recording
                current.wait_stream(self._stream)
                # other threads may use the device meanwhile
                with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                    logits = self._logits(storage, rows)
        except RuntimeError as error:
            _log.warning("decoding goes on without CUDA graphs, which takes several times as long: %s", error)
            self._drop()
            self._records = False
            return
        self._graphs[rows] = graph, logits
        _log.info("recorded a decoding step of %d rows in %.2f s", rows, time.perf_counter() - began)

    def _drop(self) -> None:
        """Frees all graphs and their memory."""
        if self._graphs:
            torch.cuda.synchronize(self._pool.device)  # one may still be running
        self._graphs.clear()
        self._waited.clear()
        self._recorded = self._memory = None


def padded(rows: int) -> int:
    """The number of rows with which a step is computed: a power of two, or three quarters of one above 16."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power > 16 and rows <= power * 3 // 4 else power
