"""Immutable values: `FrozenDict`, and `freeze` / `thaw` to convert between plain and frozen data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any


class FrozenDict(Mapping[str, Any]):
    """An immutable, ordered, hashable, picklable mapping whose values are frozen all the way down.

    Equal to a dict of the same (frozen) items. Example: `FrozenDict({"a": [1]}) == {"a": (1,)}`.
    """

    __slots__ = ("_items",)
    _items: dict[str, Any]

    def __init__(self, items: Mapping[str, Any] = MappingProxyType({})) -> None:
        object.__setattr__(self, "_items", {key: freeze(value) for key, value in items.items()})

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("FrozenDict is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("FrozenDict is immutable")

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._items!r})"

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (self._items,)


def freeze(value: object) -> Any:
    """Lists become tuples and mappings become `FrozenDict`, at every depth; anything else stays as it is."""
    if isinstance(value, FrozenDict):
        return value
    if isinstance(value, Mapping):
        return FrozenDict(value)
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: object) -> Any:
    """The plain form of frozen data, for JSON and keyword arguments: tuples become lists, mappings become dicts."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    return value
