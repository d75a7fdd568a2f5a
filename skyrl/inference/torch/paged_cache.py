"""Keys and values of the rows in flight in pages, at addresses that stay the same from step to step.

    table      row 0   3 1      states   page 0   padding rows write here
               row 1   2 0               page 1   tokens 256.. of row 0
               padding 0 0               page 2   tokens 0.. of row 1
                                         page 3   tokens 0.. of row 0

A row that leaves gives its pages back, and the last row takes its place in the table: keys and values are never moved.
Tokens and log-probabilities are where `RowCache` has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor

from skyrl.inference.torch.kv_cache import PlacedPrompt, RowCache
from skyrl.inference.torch.paged_attention import PAGE, has_tables

_AHEAD = 64
"""Number of tokens for which rows get pages in advance, so that tables change rarely."""

_SHARE = 8
"""Part of the device's memory that pages may take before they are needed, and between batches: one in this number."""


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


class PagePool:
    """The storage of one engine, lent to one cache at a time. It grows on demand and shrinks only by `release`."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head: int,
        rows: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """For at most `rows` rows, padding included, of at most `longest` tokens."""
        self.device = device
        self.storage: PageStorage | None = None
        self._rows, self._longest, self._tables = rows, longest, has_tables()
        self._shape = (layers, 2, kv_heads, head)
        self._dtype = dtype
        self.user: PagedCache | None = None
        """The cache whose rows are in the storage."""

    def pages_for(self, tokens: int) -> int:
        """Number of pages of a row of `tokens`."""
        return _units(tokens) if self._tables else 1

    def fit(self, user: PagedCache, *, now: int, total: int, pages: int, later: int) -> PageStorage:
        """The storage for `user`, with room for `pages` pages, the one for padding included.

        The longest row needs room for `now` tokens and may reach `total`; all rows may need `later` pages. Twice as
        many are reserved if there is room, and if so many rows may come.
        """
        old, self.user = self.storage, user
        if old is not None and pages <= old.pages and (total if self._tables else now) <= old.table.shape[1] * old.page:
            return old
        room = self._room()
        if self._tables:
            units, width, target_pages = 1, self._doubled(total), min(2 * later, self._rows * _units(total) + 1)
        else:
            units, width, target_pages = self._doubled(total), 1, min(2 * later, self._rows + 1)
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
        return min(1 << (_units(tokens) - 1).bit_length(), _units(self._longest))

    def _room(self) -> int:
        """Number of units of `PAGE` tokens that may be reserved before they are needed."""
        layers, both, kv_heads, head = self._shape
        size = layers * both * kv_heads * head * PAGE * self._dtype.itemsize
        free = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else self.kept_bytes
        return min(free, self.kept_bytes) // size

    def _grown(self, old: PageStorage | None, pages: int, page: int, width: int) -> PageStorage:
        layers, both, kv_heads, head = self._shape
        states = torch.zeros((layers, both, pages, page, kv_heads, head), dtype=self._dtype, device=self.device)
        table = torch.zeros((self._rows, width), dtype=torch.int32, device=self.device)
        if old is None:
            ids, positions = torch.zeros((2, self._rows), dtype=torch.int64, device=self.device)
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
            starts.append(self.place(prompt.ids, (), prompt.copies))
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
