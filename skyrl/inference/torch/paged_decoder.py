"""Decoding over pages: keys and values of the rows in flight are at addresses that stay the same from step to step.

    table      row 0   3 1      states   page 0   padding rows write here
               row 1   2 0               page 1   tokens 256.. of row 0
               padding 0 0               page 2   tokens 0.. of row 1
                                         page 3   tokens 0.. of row 0

A row that leaves gives its pages back, and the last row takes its place in the table: keys and values are never moved.
Tokens and log-probabilities are where `RowCache` has them.

On CUDA, a step is one CUDA graph, which is recorded for a few numbers of rows and replayed. A step of a small model
launches hundreds of short kernels, which takes the host ten times as long as the device needs for them; a graph
launches them at once. It reads weights, pages, tokens and positions at fixed addresses. It is recorded again if one of
these moves: the pool of pages grows, or weights are not replaced in place. Steps of rows with adapters are not
recorded: their factors move whenever other adapters share the batch.

Attention is by torch's FlashAttention kernels for CUDA, which read the number of keys of each row, and the pages that
hold them, from tensors on the device: one recorded call computes every step. Older versions of torch do not pass them a
table of pages. There a row has one page, as long as the longest row.

On other devices, which only tests use, a step is the same call without a recording.

Shapes: R rows, D head size, P pages of B tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl.inference.torch.fused_decoder import FusedDecoder
from skyrl.inference.torch.kv_cache import PlacedPrompt, RowCache
from skyrl.models.attention.varlen_attention import AMPERE, LARGEST_HEAD

_log = logging.getLogger(__name__)

PAGE = 256
"""Number of tokens in a page, of which the kernels accept multiples."""

_AHEAD = 64
"""Number of tokens for which rows get pages in advance, so that tables change rarely."""

_SHARE = 8
"""Part of the device's memory that pages may take before they are needed, and between batches: one in this number."""

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
            if not self._checked or self._recorded is None or self._recorded[0] is not storage:
                read = (storage, self._fused.addresses())
                if read != self._recorded:
                    self._drop()
                    self._recorded = read
                self._checked = True
            chosen = self._chosen(padded(rows))
            if chosen not in self._graphs:
                self._record(storage, chosen)
            if chosen not in self._graphs:
                return self._logits(storage, padded(rows))[:rows]
            graph, logits = self._graphs[chosen]
            graph.replay()
            return logits[:rows]

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


@frozen(kw_only=True, eq=False)
class PageStorage:
    """All that a step reads and writes, weights and new logits aside."""

    states: Tensor
    """Keys and values, (layers, 2, pages, tokens of a page, kv_heads, head_dim). Page 0 belongs to padding rows."""

    table: Tensor
    """(rows, pages of a row) int32: pages of each row, 0 where it has none."""

    ids: Tensor
    """(rows,) int64: newest token of each row."""

    positions: Tensor
    """(rows,) int64: position of that token in the row; 0 for padding."""

    @property
    def pages(self) -> int:
        return self.states.shape[2]

    @property
    def page(self) -> int:
        """Number of tokens in a page."""
        return self.states.shape[3]


@define(kw_only=True, eq=False)
class PagePool:
    """The storage of one engine, lent to one cache at a time. It grows on demand and shrinks only by `release`."""

    layers: int
    kv_heads: int
    head: int
    rows: int
    """Largest number of rows, padding included."""

    longest: int
    """Largest number of tokens in a row."""

    dtype: torch.dtype
    device: torch.device
    storage: PageStorage | None = None
    user: PagedCache | None = None
    """The cache whose rows are in the storage."""

    def pages_for(self, tokens: int) -> int:
        """Number of pages of a row of `tokens`."""
        return _units(tokens) if has_tables() else 1

    def fit(self, user: PagedCache, *, now: int, total: int, pages: int, later: int) -> PageStorage:
        """The storage for `user`, with room for `pages` pages, the one for padding included.

        The longest row needs room for `now` tokens and may reach `total`; all rows may need `later` pages. Twice as
        many are reserved if there is room, and if so many rows may come.
        """
        old, self.user = self.storage, user
        if old is not None and pages <= old.pages and (total if has_tables() else now) <= old.table.shape[1] * old.page:
            return old
        room = self._room()
        if has_tables():
            units, width, target_pages = 1, self._doubled(total), min(2 * later, self.rows * _units(total) + 1)
        else:
            units, width, target_pages = self._doubled(total), 1, min(2 * later, self.rows + 1)
            units = units if target_pages * units <= room else self._doubled(now)
        if old is not None:
            units, width = max(units, old.page // PAGE), max(width, old.table.shape[1])
            target_pages, room = max(target_pages, old.pages), max(room, units * old.pages * 3 // 2)
        try:
            grown = self._grown(old, max(pages, min(target_pages, room // units)), units * PAGE, width)
        except torch.OutOfMemoryError:
            grown = self._grown(old, pages, units * PAGE, width)
        self.storage = grown
        return grown

    def release(self, *, most_bytes: int = 0) -> bool:
        """Gives a storage of more than `most_bytes` up, unless rows are in it. Returns whether it did."""
        used = self.user is not None and self.user.window.rows > 0
        if self.storage is None or used or self.storage.states.nbytes <= most_bytes:
            return False
        self.storage = self.user = None
        return True

    @property
    def kept_bytes(self) -> int:
        """Largest storage that is kept between batches, in bytes."""
        if self.device.type != "cuda":
            return 1 << 30
        return torch.cuda.get_device_properties(self.device).total_memory // _SHARE

    def _doubled(self, tokens: int) -> int:
        """Number of units that hold `tokens`, rounded up to a power of two, so that storage has few shapes."""
        return min(1 << (_units(tokens) - 1).bit_length(), _units(self.longest))

    def _room(self) -> int:
        """Number of units of `PAGE` tokens that may be reserved before they are needed."""
        size = self.layers * 2 * self.kv_heads * self.head * PAGE * self.dtype.itemsize
        free = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else self.kept_bytes
        return min(free, self.kept_bytes) // size

    def _grown(self, old: PageStorage | None, pages: int, page: int, width: int) -> PageStorage:
        shape = (self.layers, 2, pages, page, self.kv_heads, self.head)
        states = torch.zeros(shape, dtype=self.dtype, device=self.device)
        table = torch.zeros((self.rows, width), dtype=torch.int32, device=self.device)
        if old is None:
            ids, positions = torch.zeros((2, self.rows), dtype=torch.int64, device=self.device)
            return PageStorage(states=states, table=table, ids=ids, positions=positions)
        states[:, :, : old.pages, : old.page] = old.states
        table[:, : old.table.shape[1]] = old.table
        return PageStorage(states=states, table=table, ids=old.ids, positions=old.positions)


@define(eq=False)
class _Row:
    start: int
    """Column of the first token."""

    total: int
    """Largest number of tokens."""

    pages: list[int] = field(factory=list)


class PagedCache(RowCache):
    """The cache of all rows in flight, with keys and values in pages; for models that `FusedDecoder` computes."""

    copies_computed = True

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool.device)
        self._pool = pool
        self._rows: list[_Row] = []
        self._free: list[int] = []
        self._until = 0
        """First column for which a row has no room."""

    def reserve(self, rows: int, *, before: int, ahead: int) -> int:
        """Reserve storage as `RowCache.reserve` does, and give the rows pages for their next tokens."""
        shift = super().reserve(rows, before=before, ahead=ahead)
        if shift:
            for row in self._rows:
                row.start += shift
            self._until += shift
        if self._rows and self.window.end >= self._until:
            self._extend()
        return shift

    def place_all(self, prompts: Sequence[PlacedPrompt]) -> list[int]:
        """Appends the rows of the prompts, in reserved space; returns the first column of each prompt."""
        starts, joined = [], len(self._rows)
        for prompt in prompts:
            starts.append(self.place(evolve(prompt, layers=(), experts=None)))
            self._rows += [_Row(starts[-1], prompt.total) for _ in range(prompt.copies)]
        self._write(prompts, joined, self._extend())
        return starts

    def computed(self, row: int, start: int) -> tuple[tuple[int, ...], tuple[tuple[Tensor, Tensor], ...]]:
        """Tokens of a row that were computed, and copies of their keys and values."""
        storage, length = self._pool.storage, self.window.end - start
        assert storage is not None
        firsts = range(0, length, storage.page)
        pieces = [
            storage.states[:, :, page, : length - first]
            for page, first in zip(self._rows[row].pages, firsts, strict=False)  # it may have pages for later tokens
        ]
        states = torch.cat(pieces, 2).transpose(2, 3)
        return tuple(self.tokens[row, 0, start : self.window.end].tolist()), tuple((k, v) for k, v in states)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drops all rows except `rows` (ascending). Returns the previous index of the row at each index."""
        order, before = super().keep(rows), len(self._rows)
        for index in set(range(before)).difference(rows):
            self._free += self._rows[index].pages
        self._rows = [self._rows[index] for index in order]
        storage = self._pool.storage
        if storage is not None and before:
            previous = torch.tensor(order, dtype=torch.int64, device=self._pool.device)
            storage.table[: len(order)] = storage.table[previous]
            storage.table[len(order) : before] = 0  # rows that leave become padding
            storage.positions[len(order) : before] = 0
        return order

    def _extend(self) -> PageStorage:
        """Gives each row pages for its tokens so far and the next ones, and enters them in the table."""
        end, used_pages = self.window.end, sum(len(row.pages) for row in self._rows)
        needs = [min(end + _AHEAD - row.start, row.total) for row in self._rows]
        counts = [max(self._pool.pages_for(need), len(row.pages)) for need, row in zip(needs, self._rows, strict=True)]
        totals = [row.total for row in self._rows]
        later = 1 + sum(map(self._pool.pages_for, totals))
        storage = self._pool.fit(self, now=max(needs), total=max(totals), pages=1 + sum(counts), later=later)
        if used_pages == 0:  # whatever an earlier cache left there
            storage.table.zero_()
            storage.positions.zero_()
            self._free = []
        self._free += range(1 + used_pages + len(self._free), storage.pages)
        entries = []
        for index, (row, count) in enumerate(zip(self._rows, counts, strict=True)):
            for column in range(len(row.pages), count):
                row.pages.append(self._free.pop())
                entries.append((index, column, row.pages[-1]))
        if entries:
            rows, columns, pages = torch.tensor(entries, device=self._pool.device).unbind(1)
            storage.table[rows, columns] = pages.int()
        self._until = min(row.start + len(row.pages) * storage.page for row in self._rows)
        return storage

    def _write(self, prompts: Sequence[PlacedPrompt], joined: int, storage: PageStorage) -> None:
        """Copies keys and values of the prompts to the pages of their rows, from `joined` on: a few calls for each
        layer, however many prompts there are.
        """
        device, page = self._pool.device, storage.page
        copies: list[tuple[int, int, int]] = []  # row, length, place of the prompt's first token among all prompts
        first = 0
        for prompt in prompts:
            copies += [(joined + len(copies) + copy, len(prompt.ids), first) for copy in range(prompt.copies)]
            first += len(prompt.ids)
        tokens = sum(length for _, length, _ in copies)
        rows, sizes, firsts = torch.tensor(copies, device=device).unbind(1)
        rows, firsts, before = (
            part.repeat_interleave(sizes, output_size=tokens) for part in (rows, firsts, sizes.cumsum(0) - sizes)
        )
        positions = torch.arange(tokens, device=device) - before
        slots, sources = storage.table[rows, positions // page] * page + positions % page, firsts + positions
        for layer, states in enumerate(storage.states):
            for part, pages in enumerate(states):
                new = torch.cat([prompt.layers[layer][part] for prompt in prompts], 1)
                pages.flatten(0, 1)[slots] = new.transpose(0, 1)[sources]


def _units(tokens: int) -> int:
    """Number of units of `PAGE` tokens that hold `tokens`."""
    return -(-tokens // PAGE)


@frozen(kw_only=True, eq=False)
class RowPages:
    """The keys of each row of a step."""

    table: Tensor
    """(R, pages of a row) int32: pages of each row, in order. Entries behind the row's last token are not read."""

    used: Tensor
    """(R,) int32: number of keys of each row, at least 1."""

    query_bounds: Tensor
    """(R + 1,) int32: 0 to R, one query for each row."""

    longest: int
    """Number of tokens in all pages of a row."""

    @classmethod
    def of(cls, table: Tensor, positions: Tensor, page: int) -> RowPages:
        """The keys up to `positions` (R,), the place of each row's newest token. Only tensors depend on it."""
        return cls(
            table=table,
            used=positions.int() + 1,
            query_bounds=torch.arange(len(table) + 1, dtype=torch.int32, device=table.device),
            longest=table.shape[1] * page,
        )


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, rows: RowPages) -> Tensor:
    """Attention of each row's query to all its keys, by FlashAttention.

    Shapes: query (R, heads, D), keys and values (P, B, kv_heads, D), all of one 16-bit type -> (R, heads * D).
    """
    if has_tables():
        arguments: dict[str, Any] = {"block_table": rows.table}
        key_bounds = rows.query_bounds  # not read
    else:
        arguments = {}
        key_bounds = torch.cat((rows.table[:, 0] * keys.shape[1], rows.table[-1:, 0]))  # first key of each row
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        rows.query_bounds,
        key_bounds,
        1,
        rows.longest,
        0.0,
        False,
        False,
        seqused_k=rows.used,
        **arguments,
    )[0]
    return mixed.reshape(len(query), -1)


def gathered_attention(query: Tensor, keys: Tensor, values: Tensor, rows: RowPages) -> Tensor:
    """The same as `paged_attention`, for every device and type, row by row: it makes the host wait for the device."""
    mixed = []
    for row, (table, used) in enumerate(zip(rows.table.long(), rows.used.tolist(), strict=True)):
        key, value = (states[table].flatten(0, 1)[:used].transpose(0, 1) for states in (keys, values))
        mixed.append(scaled_dot_product_attention(query[row].unsqueeze(1), key, value, enable_gqa=True).flatten())
    return torch.stack(mixed)


def refusal(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head: int) -> str:
    """Why `paged_attention` cannot be used for heads of this number and size; empty if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the device is {device}"
    if dtype.itemsize != 2:
        return f"the type is {dtype}, not one of 16 bits"
    if head % 8 or head > LARGEST_HEAD:
        return f"heads of {head} are not multiples of 8 up to {LARGEST_HEAD}"
    if not torch.backends.cuda.is_flash_attention_available() or "seqused_k" not in _arguments():
        return f"torch {torch.__version__} has no kernels for it"
    if torch.cuda.get_device_capability(device) < AMPERE:
        return f"{torch.cuda.get_device_name(device)} is too old"
    return _fault(device, dtype, heads, kv_heads, head)


@torch.inference_mode()
def _fault(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head: int) -> str:
    """Describes what is wrong with the kernel's result for three rows of different lengths; empty if nothing is."""
    generator = torch.Generator().manual_seed(0)
    width = 2 if has_tables() else 1
    keys, values = torch.randn((2, 3 * width + 1, PAGE, kv_heads, head), generator=generator).to(device, dtype)
    query = torch.randn((3, heads, head), generator=generator).to(device, dtype)
    table = torch.arange(3 * width, 0, -1, dtype=torch.int32, device=device).view(3, width)
    rows = RowPages.of(table, torch.tensor([0, 176, width * PAGE - 8], device=device), PAGE)
    try:
        result, expected = (attend(query, keys, values, rows) for attend in (paged_attention, gathered_attention))
    except (RuntimeError, TypeError) as error:
        return f"the kernel raises {error}"
    largest = float((result - expected).abs().max())
    return "" if largest < 0.05 else f"the kernel is wrong by {largest:.2g}"  # NaN is wrong, too


def has_tables() -> bool:
    """Whether the kernels take a table of pages."""
    return "block_table" in _arguments()


@cache
def _arguments() -> frozenset[str]:
    """Names of the arguments of torch's FlashAttention operator, which differ between versions."""
    return frozenset(argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments)
