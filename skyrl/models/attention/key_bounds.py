"""How far a layer's attention sees: a window of the tokens before each token, or a chunk of the sequence.

Bounds count by position in the sequence. transformers counts by place in the row of the call, which is the same only
for a sequence on its own.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn


@frozen
class KeyBounds:
    """The tokens before it that a token sees, itself included. Hashable, so that masks are made once for each."""

    window: int | None = None
    """The last `window` of them (arXiv:2004.05150, sec. 3). None: no bound."""

    chunk: int | None = None
    """Tokens of the stretches of positions that do not see each other, as in Llama 4. None: no bound."""

    def within(self, tokens: int) -> KeyBounds:
        """The bounds that matter in a sequence of `tokens`."""
        return KeyBounds(
            *(bound if bound is not None and bound < tokens else None for bound in (self.window, self.chunk))
        )

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether a query reaches a key: positions (..., Q) and (..., K) -> (..., Q, K) bool. A later key counts as
        reached.
        """
        query, key = queries.unsqueeze(-1), keys.unsqueeze(-2)
        seen = torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=query.device)
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen

    def first_key(self, query: int) -> int:
        """Position of the first key that a query at this position sees."""
        by_window = 0 if self.window is None else query - self.window + 1
        by_chunk = 0 if self.chunk is None else query // self.chunk * self.chunk
        return max(0, by_window, by_chunk)

    def mask(self, before: int, tokens: int, device: torch.device) -> Tensor:
        """(tokens, K) bool: the keys that each of `tokens` queries after `before` others sees, of the last K keys,
        which are all that any of them sees.
        """
        positions = torch.arange(before + tokens, device=device)
        queries, keys = positions[before:], positions[self.first_key(before) :]
        return self.sees(queries, keys) & (keys <= queries.unsqueeze(1))


WHOLE = KeyBounds()
"""All tokens before it."""


def key_bounds_of(module: nn.Module, window: int | None) -> KeyBounds:
    """The bounds of a transformers attention module; `window` is what it passes to its attention function."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    match kinds[index] if kinds and index is not None and index < len(kinds) else None:
        case "full_attention":
            return WHOLE
        case "chunked_attention":
            return KeyBounds(chunk=config.attention_chunk_size)
        case "sliding_attention":
            return KeyBounds(window=window or config.sliding_window)
        case _:
            return KeyBounds(window=window)
