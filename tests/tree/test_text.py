"""Text from a command line means what the type of its field says."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest

from skyrl.tree import FrozenDict
from skyrl.tree.types import TypeMismatch, coerce_exact, parse


class Color(enum.Enum):
    RED = "red"


AS_A_LIST = """quote it for the shell: '["a", "b"]'"""
AS_A_TABLE = """quote it for the shell: '{"key": 1}'"""
VERBATIM = ("1e5", "007", "true", "null", "none", "None", "", " a b ", "[a]", '"quoted"', "a=b")

READ: list[tuple[Any, str, Any]] = [
    # type, text, value
    *((str, text, text) for text in VERBATIM),
    (bool, "true", True),
    (bool, "False", False),
    (bool, "TRUE", True),
    (int, "12", 12),
    (int, "-3", -3),
    (int, "1_000", 1000),
    (float, "1e-6", 1e-6),
    (float, "3", 3.0),
    (float, ".5", 0.5),
    (int | None, "null", None),
    (int | None, "none", None),
    (int | None, "None", None),
    (int | None, "3", 3),
    (str | None, "none", None),
    (str | None, "nil", "nil"),
    (str | None, "1e5", "1e5"),
    (bool | int, "true", True),
    (bool | int, "8", 8),
    (int | Literal["auto"], "auto", "auto"),
    (Literal[0, 1] | None, "1", 1),
    (Literal["none", "latest"] | None, "none", "none"),
    (Literal["none", "latest"] | None, "null", None),
    (tuple[str, ...], '["a", "b"]', ("a", "b")),
    (tuple[str, ...], "['a', 'b']", ("a", "b")),
    (tuple[str, ...], "[]", ()),
    (tuple[float, ...], "[0.9, 1]", (0.9, 1.0)),
    (tuple[float, ...], "(0.9, 0.999)", (0.9, 0.999)),
    (str | tuple[str, ...], "all-linear", "all-linear"),
    (str | tuple[str, ...], r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
    (str | tuple[str, ...], "['q', 'v']", ("q", "v")),
    (str | tuple[str, ...], "5", "5"),
    (Mapping[str, Any], '{"a": 1}', FrozenDict({"a": 1})),
    (Mapping[str, Any], "{a = 1.5, b = 'x'}", FrozenDict({"a": 1.5, "b": "x"})),
    (Mapping[str, Any], "{'a': None}", FrozenDict({"a": None})),
    (Mapping[str, Any] | None, "null", None),
    (Color, "red", Color.RED),
]

ANYTHING: list[tuple[str, Any]] = [
    ("null", None),
    ("true", True),
    ("False", False),
    ("12", 12),
    ("-1.5", -1.5),
    ("1e5", 100000.0),
    (".5", 0.5),
    ("1_000", 1000),
    ("0x10", 16),
    ('"12"', "12"),
    ("'none'", "none"),
    ("[1, 'a']", (1, "a")),
    ("{a = [1]}", FrozenDict({"a": (1,)})),
    # what looks like something else and is text
    ("007", "007"),
    ("1,2", "1,2"),
    ("1 # one", "1 # one"),
    ("2026-11-21", "2026-11-21"),
    ("12:30:00", "12:30:00"),
    ("nan", "nan"),
    ("inf", "inf"),
    ("1e999", "1e999"),
    ("b'a'", "b'a'"),
    ("...", "..."),
    ("1\nother = 2", "1\nother = 2"),
    ("flash_attn", "flash_attn"),
    ("", ""),
]

NOT_READ: list[tuple[Any, str, str, str]] = [
    # type, text, message, hint
    (bool, "yes", "'yes' is not true or false", ""),
    (bool, "1", "'1' is not true or false", ""),
    (int, "1e3", "'1e3' is not a whole number", ""),
    (int, "1.0", "'1.0' is not a whole number", ""),
    (int, "true", "'true' is not a whole number", ""),
    (int, "null", "'null' is not a whole number", ""),
    (int, "9" * 5000, "is not a whole number", ""),
    (int, str(2**64), "does not fit into 64 bits", ""),
    (float, "fast", "'fast' is not a number", ""),
    (float, "nan", "nan is not a finite number", ""),
    (float, "1e999", "inf is not a finite number", ""),
    (float, "9" * 400, "inf is not a finite number", ""),
    (float, "", "'' is not a number", ""),
    (str, "\udcff", "is not Unicode text", ""),
    (Literal["a", "b"], "c", "'c' is not one of: a, b", ""),
    (Color, "blue", "'blue' is not a Color (ValueError: 'blue' is not a valid Color)", ""),
    (int | None, "nil", "'nil' is not a whole number", ""),
    (tuple[str, ...], "a,b", "'a,b' is not a list of text", AS_A_LIST),
    (tuple[str, ...], "[a.jsonl", "'[a.jsonl' is not a list of text", AS_A_LIST),
    (tuple[str, ...], '"a"', "is not a list of text", AS_A_LIST),
    (tuple[str, ...], "", "'' is not a list of text", AS_A_LIST),
    (tuple[int, ...], "3", "3 is not a list of whole numbers", "write [3]"),
    (tuple[int, ...], "a", "'a' is not a list of whole numbers", AS_A_LIST),
    (tuple[str, ...], "[a,b]", "'[a,b]' is not a list or a table", AS_A_LIST),
    (tuple[str, ...], "null", "'null' is not a list of text", AS_A_LIST),
    (tuple[str, ...], "[1]", "item 0: 1 is not text", "put it in quotes"),
    (tuple[str, ...], r'["\d"]', "is not a list or a table", AS_A_LIST),
    (str | tuple[str, ...], "[q,v]", "'[q,v]' is not a list or a table", AS_A_LIST),
    (Mapping[str, Any], "{a:1}", "'{a:1}' is not a list or a table", AS_A_TABLE),
    (Mapping[str, Any], "5", "5 is not a table", ""),
    (Mapping[str, Any], "[NaN]", "'[NaN]' is not a list or a table", AS_A_LIST),
    (Any, "[a,b]", "'[a,b]' is not a list or a table", AS_A_LIST),
    (tuple[str, ...], "[" * 100_000, "is not a list of text", AS_A_LIST),
    (Any, "[" * 900 + "]" * 900, "is not a list or a table", AS_A_LIST),
]


def short(value: Any) -> str:
    """A test's name for a type or text."""
    return (getattr(value, "__name__", None) or str(value)[:30]).encode("ascii", "replace").decode()


@pytest.mark.parametrize(("kind", "text", "value"), READ, ids=short)
def test_text_is_read_as_the_type_says(kind: Any, text: str, value: Any) -> None:
    read = parse(text, kind)
    assert (type(read), repr(read)) == (type(value), repr(value))


@pytest.mark.parametrize(("text", "value"), ANYTHING, ids=short)
def test_text_for_anything_is_null_a_number_a_list_a_table_or_itself(text: str, value: Any) -> None:
    read = parse(text, Any)
    assert (type(read), repr(read)) == (type(value), repr(value))


@pytest.mark.parametrize(("kind", "text", "message", "hint"), NOT_READ, ids=short)
def test_text_of_another_type_is_refused_in_words(kind: Any, text: str, message: str, hint: str) -> None:
    with pytest.raises(TypeMismatch) as caught:
        parse(text, kind)
    assert message in str(caught.value)
    assert caught.value.hint == hint


ONE: list[tuple[Any, Any]] = [
    (tuple[str, ...], ("x.jsonl",)),
    (list[str], ("x.jsonl",)),
    (Sequence[str], ("x.jsonl",)),
    (tuple[str, ...] | None, ("x.jsonl",)),
    (tuple[Literal["x.jsonl", "y"], ...], ("x.jsonl",)),
    (tuple[Annotated[str, "a path"], ...], ("x.jsonl",)),
    # where a text has a meaning of its own, it is no list
    (str | tuple[str, ...], "x.jsonl"),
    (Literal["x.jsonl"] | tuple[Literal["x.jsonl", "y"], ...], "x.jsonl"),
    (int | str | tuple[int | str, ...], "x.jsonl"),
]


@pytest.mark.parametrize(("kind", "stored"), ONE, ids=short)
def test_a_single_text_is_a_list_of_one_from_every_source(kind: Any, stored: Any) -> None:
    assert parse("x.jsonl", kind) == coerce_exact("x.jsonl", kind) == stored


@pytest.mark.parametrize("text", [",", "a,b", "5", "true", "[x]", "a b", " "])
def test_text_of_a_file_is_one_item_whatever_it_holds(text: str) -> None:
    """Only on a command line may it be a list whose brackets or quotes the shell removed."""
    assert coerce_exact(text, tuple[str, ...]) == (text,)


@pytest.mark.parametrize("text", ["5", "true", "a b", "1e5", "~/x", "env", "a=b"])
def test_an_argument_is_text_where_the_list_is_one_of_text(text: str) -> None:
    assert parse(text, tuple[str, ...]) == (text,)
