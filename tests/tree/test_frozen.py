"""Freezing: what was written stays as it was written."""

from __future__ import annotations

import copy
import pickle
from types import MappingProxyType
from typing import Any

import pytest

from skyrl.tree import FrozenDict, freeze, thaw

NESTED: dict[str, Any] = {"a": [1, {"b": [2.0, None]}], "c": "text", "d": {}}


def test_a_frozen_dict_equals_a_dict_of_its_frozen_items() -> None:
    assert FrozenDict({"a": [1, 2], "b": {"c": True}}) == {"a": (1, 2), "b": {"c": True}}


def test_freezing_goes_all_the_way_down() -> None:
    frozen = freeze(NESTED)
    assert isinstance(frozen, FrozenDict)
    assert isinstance(frozen["a"][1], FrozenDict)
    assert frozen["a"][1]["b"] == (2.0, None)


def test_thawing_gives_back_what_was_frozen() -> None:
    thawed = thaw(freeze(NESTED))
    assert thawed == NESTED
    assert type(thawed["a"]) is list
    assert type(thawed["a"][1]) is dict


def test_a_source_that_changes_later_changes_nothing() -> None:
    source: dict[str, Any] = {"a": [1, 2], "b": {"c": [3]}}
    frozen = FrozenDict(source)
    source["a"].append(9)
    source["b"]["c"].append(9)
    source["d"] = [9]
    assert frozen == {"a": (1, 2), "b": {"c": (3,)}}


def test_a_thawed_copy_that_changes_changes_nothing() -> None:
    frozen = FrozenDict(NESTED)
    thaw(frozen)["a"].append(9)
    assert thaw(frozen) == NESTED


def test_nothing_can_be_set_or_deleted() -> None:
    frozen: Any = FrozenDict({"a": 1})
    with pytest.raises(TypeError):
        frozen["a"] = 2
    with pytest.raises(TypeError):
        del frozen["a"]
    with pytest.raises(AttributeError):
        frozen._items = {}
    with pytest.raises(AttributeError):
        del frozen._items
    assert frozen == {"a": 1}


def test_order_is_kept_and_does_not_count() -> None:
    one, other = FrozenDict({"b": 1, "a": 2}), FrozenDict({"a": 2, "b": 1})
    assert list(one) == ["b", "a"]
    assert one == other
    assert hash(one) == hash(other)


def test_pickle_and_deepcopy_keep_equality_hash_and_order() -> None:
    frozen = FrozenDict(NESTED)
    for twin in (pickle.loads(pickle.dumps(frozen)), copy.deepcopy(frozen), copy.copy(frozen)):
        assert type(twin) is FrozenDict
        assert twin == frozen
        assert hash(twin) == hash(frozen)
        assert list(twin) == list(frozen)


def test_it_can_be_handed_over_as_keyword_arguments() -> None:
    assert dict(**FrozenDict({"a": 1})) == {"a": 1}


def test_any_mapping_freezes() -> None:
    assert type(freeze(MappingProxyType({"a": 1}))) is FrozenDict
