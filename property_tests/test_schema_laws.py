"""The schema that editors check files by, and the loader, agree on what a file may hold.

Whatever the loader takes, the schema takes, but for names that only a program registers: an editor cannot tell them
from misspelled ones. What the schema takes, the loader takes, with three exceptions, which JSON Schema cannot express:
what a variable holds that `env:NAME` names; that 1.0 is no whole number; and rules on one field that are neither a
range of numbers nor a pattern (`BEYOND_A_RANGE`, and the grammar of `placement.allocation`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from property_tests.doors import SCALARS
from property_tests.trees import LEAVES, SIMPLE, Overrides, as_tables, overrides
from skyrl.config import SkyRLTrainConfig, load
from skyrl.errors import ConfigError
from skyrl.tree.classes import fit_field, names_of
from skyrl.tree.dump import stored_value
from skyrl.tree.schema import json_schema
from skyrl.tree.validators import requirement_of

VALUES: tuple[Any, ...] = (
    *SIMPLE, *(value for value in SCALARS if value not in (10**400, "\ud800")),
    "10s", "2GiB", "2 GiB ", "3 epochs", "10 steps", 2**31, 3.0, 65536, [0.5], [1, 2], ["a"], ["a", "b"], [""],
    {"a": 1}, {"a": "b"}, "cpu", "bf16", "auto", "console", "latest",
)  # fmt: skip
BEYOND_A_RANGE = (
    "an interval",
    "a time",
    "positive, or -1 for",
    "allowed",  # as a field that another one replaces
    "a non-empty value",
    "a list of positive numbers",
    "a list without",
    "a table free of empty text",
    "a name, or a list of different names",
    "a text with {prompt} and {hint}",
    "two numbers",
    "true, false or a positive number",
    "one of",
)
"""How the words of these rules begin."""


def test_what_the_loader_takes_the_schema_takes() -> None:
    @given(overrides())
    def takes_each(values: Overrides) -> None:
        load([], values)
        assert schema().is_valid(as_tables({path: value for path, value in values.items() if is_known(path, value)}))

    takes_each()


def is_known(path: str, value: Any) -> bool:
    """False for a name that the field does not know, and that is no import path."""
    names, texts = names_of(LEAVES[path]), value if isinstance(value, list) else [value]
    return not names or all(not isinstance(text, str) or text in names or ":" in text for text in texts)


@pytest.mark.parametrize("count", [60, pytest.param(0, marks=pytest.mark.long)], ids=["sixty", "all"])
def test_what_the_schema_takes_the_loader_takes(count: int) -> None:
    """Every leaf with every value; of these a number with one seed."""
    documents = [(path, value) for path in LEAVES for value in VALUES]
    sample = random.Random(1).sample(documents, count) if count else documents
    assert list(disagreements(sample)) == []


def disagreements(documents: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for path, value in documents:
        tables = as_tables({path: value})
        by_schema = schema().is_valid(tables)
        try:
            load([], tables, environ={"HOME": "x", "NOBODY": "1"})
            by_loader = True
        except ConfigError:
            by_loader = False
        if by_schema != by_loader and (is_known(path, value) if by_loader else not is_an_exception(path, value)):
            yield path, value


def is_an_exception(path: str, value: Any) -> bool:
    """May the loader refuse what the schema takes?"""
    if isinstance(value, float) and value.is_integer():
        return True
    if isinstance(value, str) and (value.startswith("env:") or path == "trainer.placement.allocation"):
        return True
    try:
        fit_field(LEAVES[path], value)
    except ValueError:
        return False
    return requirement_of(LEAVES[path].validator).startswith(BEYOND_A_RANGE)


@cache
def schema() -> Draft202012Validator:
    return Draft202012Validator(json_schema(SkyRLTrainConfig))


def test_a_number_with_a_unit_has_the_units_of_its_field() -> None:
    texts = ("90 s", " 1.5h", "10", "5 parsecs", "2GiB")
    path = "trainer.faults.stall_timeout_seconds"
    assert [text for text in texts if schema().is_valid(as_tables({path: text}))] == ["90 s", " 1.5h"]


def test_the_schema_takes_each_default() -> None:
    assert all(schema().is_valid(as_tables({path: stored_value(LEAVES[path].default)})) for path in LEAVES)
