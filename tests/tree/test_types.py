"""The strictness table: which value fits which type. Nothing is cast, but a whole number to a number."""

from __future__ import annotations

import enum
import math
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import reduce
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NewType, Optional, Union, cast

import pytest

from skyrl.tree import FrozenDict, frozen
from skyrl.tree.frozen import freeze
from skyrl.tree.types import (
    DEEPEST,
    GIGABYTES,
    SECONDS,
    TypeMismatch,
    Unit,
    coerce_exact,
    config_class,
    describe,
    display_value,
    is_mapping,
    is_optional,
    plain,
)

Tokens = NewType("Tokens", int)


class Color(enum.Enum):
    RED = "red"


@frozen
class Table:
    size: int = 1


@frozen
class Wider(Table):
    more: int = 2


class Undecorated(Table):
    lost: int = 3


class Text(str):
    """Text of somebody else's class."""


def nested(depth: int) -> list[Any]:
    """A list in a list in a list ..."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


ACCEPTED: list[tuple[Any, Any, Any]] = [
    # type, value, what is stored
    (bool, True, True),
    (int, 7, 7),
    (int, -(2**63), -(2**63)),
    (float, 7, 7.0),
    (float, 1e-6, 1e-6),
    (float, -0.0, 0.0),
    (str, "1e5", "1e5"),
    (str, "", ""),
    (str, "äß 漢", "äß 漢"),
    (type(None), None, None),
    (None | int, None, None),
    (int | None, "none", None),
    (str | None, "none", None),
    (str | None, "null", "null"),
    (Optional[float], 3, 3.0),  # noqa: UP045  # the older spelling counts, too
    (Union[int, None], 3, 3),  # noqa: UP007 - the older spelling is tested
    (Literal["none", "a"], "none", "none"),
    (Literal["none", "a"] | None, "none", "none"),
    (Literal["none", "a"] | None, None, None),
    (Literal["a"] | None, "none", None),
    (Literal[0, 1], 1, 1),
    (bool | int, True, True),
    (bool | int, 1, 1),
    (int | Literal["auto"], "auto", "auto"),
    (str | tuple[str, ...], "all", "all"),
    (str | tuple[str, ...], ["q", "v"], ("q", "v")),
    (tuple[float, ...], [1, 0.5], (1.0, 0.5)),
    (tuple[str, ...], (), ()),
    (list[str], ["a"], ("a",)),
    (Sequence[int], (1,), (1,)),
    (tuple[int, str], [1, "a"], (1, "a")),
    (tuple[tuple[int, ...], ...], [[1], []], ((1,), ())),
    (Mapping[str, Any], {"a": [1]}, FrozenDict({"a": (1,)})),
    (dict[str, float], {"a": 1}, FrozenDict({"a": 1.0})),
    (Mapping[str, Any] | None, None, None),
    (Mapping[str, Any], {"a": "none"}, FrozenDict({"a": "none"})),
    (Any, None, None),
    (Any, [1, {"a": 2.0}], (1, FrozenDict({"a": 2.0}))),
    (Any, "none", "none"),
    (Table, Table(size=2), Table(size=2)),
    (Table, Wider(), Wider()),
    (Table | None, None, None),
    (Annotated[int, "tokens"], 5, 5),
    (Annotated[int, "tokens"] | None, None, None),
    (Tokens, 5, 5),
    (Color, "red", Color.RED),
    (Color, Color.RED, Color.RED),
    (PurePosixPath, PurePosixPath("a"), PurePosixPath("a")),
]

REFUSED: list[tuple[Any, Any, str]] = [
    # type, value, message
    (bool, 1, "1 is not true or false"),
    (bool, "true", "'true' is not true or false"),
    (bool, None, "null is not true or false"),
    (int, True, "true is not a whole number"),
    (int, 1.0, "1.0 is not a whole number"),
    (int, "1", "'1' is not a whole number"),
    (int, 2**64, "18446744073709551616 does not fit into 64 bits"),
    (int, None, "null is not a whole number"),
    (float, True, "true is not a number"),
    (float, "1e-6", "'1e-6' is not a number"),
    (float, math.nan, "nan is not a finite number"),
    (float, math.inf, "inf is not a finite number"),
    (float, -math.inf, "-inf is not a finite number"),
    (float, 10**400, " is not a finite number"),
    (float, 16**5000, "this int is not a finite number"),
    (str, 5, "5 is not text"),
    (str, None, "null is not text"),
    (str, Text("a"), "'a' is not text"),
    (str, b"a", "b'a' is not text"),
    (str, "\udcff", "'\\udcff' is not Unicode text"),
    (type(None), 0, "0 is not null"),
    (int | None, "null", "'null' is not a whole number"),
    (int | None, 1.5, "1.5 is not a whole number"),
    (Literal[0, 1], True, "true is not one of: 0, 1"),
    (Literal[0, 1], 1.0, "1.0 is not one of: 0, 1"),
    (Literal["a", "b"], "c", "'c' is not one of: a, b"),
    (Literal["a"], None, "null is not one of: a"),
    (bool | int, 1.0, "1.0 is not true or false or a whole number"),
    (bool | int, "true", "'true' is not true or false or a whole number"),
    (tuple[str, ...], "none", "'none' is not a list of text"),
    (tuple[str, ...], "", "'' is not a list of text"),
    (tuple[int, ...], 3, "3 is not a list of whole numbers"),
    (tuple[str, int], "abc", "'abc' is not a list of text, whole numbers"),
    (tuple[str, ...], {"a": 1}, "{a = 1} is not a list of text"),
    (tuple[str, ...], {"a"}, "{'a'} is not a list of text"),
    (tuple[float, ...], [1.0, "x"], "item 1: 'x' is not a number"),
    (tuple[int, ...], [True], "item 0: true is not a whole number"),
    (tuple[int, str], [1], "[1] is not a list of whole numbers, text"),
    (str | tuple[str, ...], [1], "[1] is not text or a list of text"),
    (Mapping[str, Any], [1], "[1] is not a table"),
    (Mapping[str, Any], "a", "'a' is not a table"),
    (Mapping[str, Any], {1: 2}, "key 1 is not text"),
    (Mapping[str, float], {"a": "x"}, "key a: 'x' is not a number"),
    (Mapping[str, Any], {"a": math.nan}, "key a: nan is not a finite number"),
    (Mapping[str, Any], {"a": {"b": {1, 2}}}, "key a: {1, 2} is not plain data"),
    (Any, object, "<class 'object'> is not plain data"),
    (Any, nested(DEEPEST + 1), f"nested more than {DEEPEST} levels"),
    (Table, {"size": 2}, "{size = 2} is not a table (Table)"),
    (Table, None, "null is not a table (Table)"),
    (Table, Undecorated(), "Undecorated lacks the decorator @frozen"),
    (Annotated[int, "tokens"], "5", "'5' is not a whole number"),
    (Tokens, "5", "'5' is not a whole number"),
    (Color, "blue", "'blue' is not a Color"),
]


def spelled(value: Any) -> str:
    """A test's name for a type or value."""
    text = getattr(value, "__name__", None) or display_value(value)[:40]
    return text.encode("ascii", "replace").decode()


@pytest.mark.parametrize(("kind", "value", "stored"), ACCEPTED, ids=spelled)
def test_a_value_that_fits_is_stored_with_its_type(kind: Any, value: Any, stored: Any) -> None:
    fitted = coerce_exact(value, kind)
    assert (type(fitted), fitted) == (type(stored), stored)
    assert repr(fitted) == repr(stored)  # of the items, too: 1 is not 1.0


@pytest.mark.parametrize(
    "value",
    [
        [], [[], [True, 1, 0.5]], {}, {"a": {"b.c": [False], "d": {}}}, "text", -3, True, {"": 1, "a b": "x"},
        date(2024, 1, 31), datetime(2024, 1, 31, 12, 30), time(12, 30, 1),
    ],
    ids=repr,
)  # fmt: skip
def test_a_message_has_a_value_as_a_toml_file_writes_it(value: Any) -> None:
    assert tomllib.loads(f"x = {display_value(value)}")["x"] == value
    assert display_value(freeze(value)) == display_value(value)


@pytest.mark.parametrize(("kind", "value", "message"), REFUSED, ids=spelled)
def test_a_value_that_does_not_fit_is_refused_in_words(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(TypeMismatch) as caught:
        coerce_exact(value, kind)
    assert message in str(caught.value)


@pytest.mark.parametrize(("kind", "value", "stored"), ACCEPTED, ids=spelled)
def test_fitting_again_changes_nothing(kind: Any, value: Any, stored: Any) -> None:
    assert coerce_exact(coerce_exact(value, kind), kind) == stored


@pytest.mark.parametrize(
    ("kind", "value", "hint"),
    [
        (float, "1e-6", "remove the quotes"),
        (int, "5", "remove the quotes"),
        (bool, "False", "remove the quotes"),
        (float | None, "3", "remove the quotes"),
        (float, "fast", ""),
        (float, "nan", ""),
        (str, 5, "put it in quotes"),
        (tuple[int, ...], 3, "write [3]"),
        (tuple[str, int], "a", "write ['a']"),
    ],
    ids=spelled,
)
def test_a_slip_of_spelling_is_told(kind: Any, value: Any, hint: str) -> None:
    with pytest.raises(TypeMismatch) as caught:
        coerce_exact(value, kind)
    assert caught.value.hint == hint


def test_a_long_value_is_cut_short_in_the_message() -> None:
    with pytest.raises(TypeMismatch) as caught:
        coerce_exact("x" * 1_000, int)
    assert len(str(caught.value)) < 120


def test_a_list_that_contains_itself_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(TypeMismatch, match="levels deep"):
        coerce_exact(cycle, Any)


def test_the_deepest_allowed_value_is_taken() -> None:
    assert coerce_exact(nested(DEEPEST), Any)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "a whole number or null"),
        (tuple[float, ...], "a list of numbers"),
        (str | tuple[str, ...] | None, "text or a list of text or null"),
        (Literal[0, 1], "one of: 0, 1"),
        (Mapping[str, Any], "a table"),
        (Table, "a table (Table)"),
        (Any, "any value"),
        (list, "a list of any values"),
        (Color, "a Color"),
    ],
    ids=spelled,
)
def test_a_type_is_described_as_a_person_would(kind: Any, words: str) -> None:
    assert describe(kind) == words


def test_what_a_type_is_can_be_asked() -> None:
    classes: list[Any] = [config_class(kind) for kind in (Table, Table | None, int | None, Any)]
    assert classes == [Table, Table, None, None]
    assert is_optional(Table | None)
    assert not is_optional(Table)
    assert is_mapping(Mapping[str, Any] | None)
    assert is_mapping(dict)
    assert not is_mapping(str | None)


@pytest.mark.parametrize(
    "value",
    [
        reduce(lambda inner, _: {"a": inner}, range(51), cast(Any, 1)),
        reduce(lambda inner, _: [inner], range(51), cast(Any, 1)),
        {1: 2},
        {"\ud800": 1},  # half a character
    ],
    ids=["tables", "lists", "a number for a key", "no Unicode"],
)
def test_plain_data_has_fifty_levels_at_most_and_texts_for_keys(value: Any) -> None:
    with pytest.raises(TypeMismatch):
        plain(value)


@pytest.mark.parametrize(
    ("unit", "text", "number"),
    [
        (GIGABYTES, "3GB", 3.0), (GIGABYTES, "3TB", 3000.0), (GIGABYTES, "3B", 3e-9), (GIGABYTES, "3KB", 3e-6),
        (GIGABYTES, "3MB", 0.003),
        (GIGABYTES, "3KiB", 3.072e-6), (GIGABYTES, "3MiB", 0.003145728), (GIGABYTES, "3GiB", 3.221225472),
        (GIGABYTES, "3TiB", 3298.534883328), (GIGABYTES, "3000000KiB", 3.072),
        (SECONDS, "3ms", 0.003), (SECONDS, "3s", 3.0), (SECONDS, "3m", 180.0), (SECONDS, "3min", 180.0),
        (SECONDS, "3h", 10800.0), (SECONDS, "3d", 259200.0),
    ],
)  # fmt: skip
def test_each_unit_is_so_many_of_the_field_s_own(unit: Unit, text: str, number: float) -> None:
    assert unit.read(text) == number


def test_a_text_that_looks_like_a_key_is_not_shown() -> None:
    key = "hf_" + "a" * 34
    assert key not in display_value(key)
    assert key not in display_value({"name": [key]})
    assert display_value("a name") == "'a name'"
