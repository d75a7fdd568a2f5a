"""The state of each row in flight: keys and values per layer, tokens and their log-probabilities.

Every row ends at the same column, however long it is, so that a new token is one slice written for all rows:

        start                 end
    row 0   . p p p p s s s s | s      p  prompt        columns [its own start, end)
    row 1   p p p p p p p s s | s      s  sampled       column `end`: not yet in keys and values
    row 2   . . . . p p s s s | s      .  unused, masked

Storage is larger than its live part and grows by doubling. A finished row is overwritten by the last live one: the
batch shrinks by copying single rows, never the whole cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from attrs import define, frozen
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@frozen(kw_only=True, eq=False)
class PlacedPrompt:
    """A computed prompt, and the rows that continue it."""

    ids: Sequence[int]

    layers: Sequence[tuple[Tensor, Tensor]]
    """Keys and values of each layer, (kv_heads, len(ids), head_dim) each."""

    copies: int
    """Number of rows."""

    total: int
    """Largest number of tokens of a row, prompt included."""

    experts: Tensor | None = None
    """Experts of each token, (len(ids), layers, K); None if they are not recorded."""


@define
class Window:
    """The live part of the storage: rows [0, rows) and columns [start, end)."""

    rows: int = 0
    start: int = 0
    end: int = 0


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, (row capacity, kv_heads, column capacity, head_dim), seen through the window."""

    keys: Tensor
    values: Tensor
    is_sliding = False  # all columns are kept; a model with windows gets them from its mask

    def __init__(self, window: Window, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated there
        self.window, self.keys, self.values = window, keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the first prompt allocates the storage. Shapes: both (rows, kv_heads, 1, head_dim)."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values of the new token, (rows, kv_heads, 1, head_dim) each, and return those of all live
        columns, (rows, kv_heads, columns, head_dim).
        """
        rows, start, end = self.window.rows, self.window.start, self.window.end
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        return self.keys[:rows, :, start : end + 1], self.values[:rows, :, start : end + 1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """The cache of all rows in flight, as transformers' models read and write it."""

    copies_computed = False
    """Whether `computed` returns copies, and not views."""

    def __init__(self, device: torch.device | str) -> None:
        self.row_layers: list[RowLayer] = []
        super().__init__(layers=cast(Any, self.row_layers))  # the same list, so that transformers sees what is added
        self.window = Window()
        self.tokens = torch.zeros((0, 1, 0), dtype=torch.int64, device=device)
        """(row capacity, 1, column capacity): prompt and sampled ids."""
        self.logprobs = torch.zeros((0, 1, 0), dtype=torch.float32, device=device)
        """Log-probabilities of the sampled ids, in the shape of `tokens`."""
        self.versions = torch.zeros((0, 1, 0), dtype=torch.int64, device=device)
        """Versions of the weights that sampled the ids, in the shape of `tokens`."""
        self.experts: Tensor | None = None
        """(row capacity, 1, column capacity, layers, K) int16: experts of the tokens that were computed; None if they
        are not recorded."""

    def reserve(self, rows: int, *, before: int, ahead: int) -> int:
        """Reserve storage for `rows` more rows, for `before` columns left of `end`, and for the next token of every
        row.

        `ahead` is an upper bound of the columns needed from `end` on: storage never grows beyond them. Returns the
        number of columns by which live columns moved to the right (to the left if negative).
        """
        window, (row_room, _, column_room) = self.window, self.tokens.shape
        needed = window.rows + rows
        if needed <= row_room and before <= window.end and window.end + min(ahead, 2) <= column_room:
            return 0
        before = max(before, window.end - window.start)
        size, shift = (needed, before + min(ahead, max(before, 64))), before - window.end
        self.tokens, self.logprobs, self.versions = (
            _moved(old, window, size, shift) for old in (self.tokens, self.logprobs, self.versions)
        )
        if self.experts is not None:
            self.experts = _moved(self.experts, window, size, shift)
        for layer in self.row_layers:
            layer.keys, layer.values = (_moved(old, window, size, shift) for old in (layer.keys, layer.values))
        window.start, window.end = window.start + shift, before
        return shift

    def place_all(self, prompts: Sequence[PlacedPrompt]) -> list[int]:
        """Appends the rows of the prompts, in reserved space; returns the first column of each prompt."""
        return [self.place(prompt) for prompt in prompts]

    def place(self, prompt: PlacedPrompt) -> int:
        """Appends the rows of a prompt, in reserved space; returns their first column."""
        window, layers, experts = self.window, prompt.layers, prompt.experts
        rows = slice(window.rows, window.rows + prompt.copies)
        columns = slice(window.end - len(prompt.ids), window.end)
        if not self.row_layers:
            row_room, _, column_room = self.tokens.shape
            for pair in layers:
                storages = (part.new_zeros((row_room, len(part), column_room, part.shape[2])) for part in pair)
                self.row_layers.append(RowLayer(window, *storages))
        for layer, (keys, values) in zip(self.row_layers, layers, strict=True):
            layer.keys[rows, :, columns] = keys
            layer.values[rows, :, columns] = values
        self.tokens[rows, 0, columns] = torch.tensor(prompt.ids, device=self.tokens.device)
        if experts is not None:
            if self.experts is None:
                self.experts = experts.new_zeros((*self.tokens.shape, *experts.shape[1:]))
            self.experts[rows, 0, columns] = experts
        window.rows, window.start = rows.stop, min(window.start, columns.start)
        return columns.start

    def computed(self, row: int, start: int) -> tuple[tuple[int, ...], tuple[tuple[Tensor, Tensor], ...]]:
        """Tokens of a row that were computed, and views of their keys and values, (kv_heads, tokens, head_dim) each."""
        columns = slice(start, self.window.end)
        layers = tuple((layer.keys[row, :, columns], layer.values[row, :, columns]) for layer in self.row_layers)
        return tuple(self.tokens[row, 0, columns].tolist()), layers

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drops all rows except `rows` (ascending). Returns the previous index of the row at each index."""
        kept, tail = set(rows), [row for row in rows if row >= len(rows)]
        order = [index if index in kept else tail.pop() for index in range(len(rows))]
        moves = [(index, row) for index, row in enumerate(order) if index != row]
        if moves:
            targets, sources = torch.tensor(moves, device=self.tokens.device).unbind(1)
            layers = (states for layer in self.row_layers for states in (layer.keys, layer.values))
            for tensor in (self.tokens, self.logprobs, self.versions, self.experts, *layers):
                if tensor is not None:
                    live = tensor[:, :, self.window.start : self.window.end + 1]
                    live[targets] = live[sources]
        self.window.rows = len(rows)
        return order


def _moved(old: Tensor, window: Window, size: tuple[int, int], shift: int) -> Tensor:
    """Storage of `size` (rows, columns) with the live part of `old`, moved right by `shift` columns.

    The rest is zero, not uninitialised: a masked column still takes part as 0 * value, which garbage can make NaN.
    """
    rows, columns = size
    new = old.new_zeros((rows, old.shape[1], columns, *old.shape[3:]))
    live = old[: window.rows, :, window.start : window.end + 1]
    new[: window.rows, :, window.start + shift : window.start + shift + live.shape[2]] = live
    return new
