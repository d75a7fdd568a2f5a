"""Keys and values of finished sequences, from which later prompts continue: the next turn of a conversation computes
only its new tokens, and prompts with a common prefix compute it once.

Sequences are found by their tokens, in blocks; the least recently used are dropped when the memory limit is exceeded.
All of them belong to one version of the weights: `clear` is called with the next. Each belongs to one adapter, by its
number, or to none (0).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from attrs import define, field, frozen
from torch import Tensor

Layers = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values per layer, (kv_heads, P, head_dim) each, of P tokens."""

MOST_BYTES = 1 << 30
"""Default limit of the device memory for kept keys and values, in bytes."""

_BLOCK = 8
"""Number of tokens in a block; shorter common prefixes are not found."""

Ids = tuple[int, ...]

Key = tuple[int, Ids]
"""Number of the adapter, and tokens."""


@frozen(kw_only=True, eq=False)
class CachedPrefix:
    """A sequence of P tokens with its keys and values."""

    ids: Ids
    layers: Layers


@define(eq=False)
class KeptPrefixes:
    """CachedPrefix sequences, found by their prefixes. Only one thread at a time may use it."""

    most_bytes: int = MOST_BYTES
    """Limit of the memory of all keys and values, in bytes; 0 keeps nothing."""

    keeps_answers: bool = True
    """Whether finished sequences are kept, for the next turn of their conversations. Common prefixes are always kept.
    """

    reused: int = 0
    """Number of prompt tokens that did not have to be computed since `clear`."""

    size: int = field(default=0, init=False)
    """Current size of all keys and values, in bytes."""

    _sequences: OrderedDict[Key, CachedPrefix] = field(factory=OrderedDict, init=False)
    _blocks: dict[int, Key] = field(factory=dict, init=False)
    """Hash of leading blocks -> the newest sequence that begins with them."""

    def find(self, prompt: Sequence[int], adapter: int = 0) -> CachedPrefix | None:
        """The longest kept prefix of the prompt, without the prompt's last token, whose logits must be computed."""
        ids = tuple(prompt[:-1])
        for block in reversed(list(_hashes((adapter, ids)))):
            key = self._blocks.get(block, (adapter, ()))
            kept = self._sequences.get(key) if key[0] == adapter else None
            length = 0 if kept is None else common_length(kept.ids, ids)
            if kept is not None and length >= _BLOCK:
                self._sequences.move_to_end(key)
                views = tuple((keys[:, :length], values[:, :length]) for keys, values in kept.layers)
                return CachedPrefix(ids=kept.ids[:length], layers=views)  # the memory of the whole stays in use
        return None

    def keep(self, ids: Ids, layers: Layers, *, adapter: int = 0, copied: bool = False) -> None:
        """Keeps a copy of a sequence, or with `copied` these tensors themselves. The least recently used sequences are
        dropped if the memory limit is exceeded.
        """
        size, key = _bytes(layers), (adapter, ids)
        if len(ids) < _BLOCK or size > self.most_bytes or key in self._sequences:
            return
        layers = layers if copied else tuple((keys.clone(), values.clone()) for keys, values in layers)
        self._sequences[key] = CachedPrefix(ids=ids, layers=layers)
        self.size += size
        self._blocks.update(dict.fromkeys(_hashes(key), key))
        while self.size > self.most_bytes:
            key, dropped = self._sequences.popitem(last=False)
            self.size -= _bytes(dropped.layers)
            for block in _hashes(key):
                if self._blocks.get(block) == key:
                    del self._blocks[block]

    def clear(self) -> None:
        """Drops everything, because the weights have changed or the memory is needed."""
        self._sequences.clear()
        self._blocks.clear()
        self.size = self.reused = 0

    def summary(self) -> str:
        """Memory in use and number of reused tokens, as text for a log."""
        return f"{self.size / 1e6:.0f} MB of keys and values were kept, {self.reused} prompt tokens not computed again"


def _bytes(layers: Layers) -> int:
    return sum(tensor.nbytes for layer in layers for tensor in layer)


def _hashes(key: Key) -> Iterator[int]:
    """Hashes of the prefixes that end with a block, the shortest first."""
    value, ids = key
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        value = hash((value, ids[end - _BLOCK : end]))
        yield value


def common_length(one: Ids, other: Ids) -> int:
    """Number of leading tokens that both sequences have in common."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(index for index in range(shorter) if one[index] != other[index])
