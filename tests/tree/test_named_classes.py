"""Free-form tables whose class is named by the field beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from skyrl.tree import FrozenDict, frozen
from skyrl.tree.arguments import read_argument
from skyrl.tree.builder import TreeBuilder
from skyrl.tree.dump import flatten
from skyrl.tree.types import ClassOf
from tests.tree.trees import built, only_problem


@frozen
class Settings:
    rate: float = 0.5
    more: Mapping[str, Any] = FrozenDict()


def find(name: Any, may_import: bool) -> type[Any] | None:
    return Settings if name == "settings" else None


@frozen
class Named:
    kind: str = "unknown"
    table: Annotated[Mapping[str, Any], ClassOf("kind", find)] = FrozenDict()


@frozen
class NamedWithDefault:
    kind: str = "settings"
    table: Annotated[Mapping[str, Any], ClassOf("kind", find)] = FrozenDict({"rate": 0.25})
    note: str = ""


def words(*args: str) -> TreeBuilder[Named]:
    builder = TreeBuilder(Named())
    builder.assign_all(read_argument(word, number) for number, word in enumerate(args, start=1))
    return builder


def test_a_problem_inside_a_named_class_has_the_whole_path() -> None:
    builder = words("kind=settings", "table.rat=1")
    assert only_problem(builder).path == "table.rat"
    assert "table.rate" in builder.broken


def test_values_that_a_named_class_has_from_the_table_s_default_are_traced_to_it() -> None:
    builder = TreeBuilder(NamedWithDefault())
    builder.assign(read_argument("note=x", 1))
    assert vars(built(builder).table)["rate"] == 0.25
    assert builder.origins["table.rate"][-1].kind == "default"


def test_a_table_has_the_same_leaves_whether_its_class_is_known_or_not() -> None:
    known = flatten(built(words("kind=settings", "table.rate=1.0", "table.more.a=2")))
    unknown = flatten(built(words("kind=other", "table.rate=1.0", "table.more.a=2")))
    assert known == {"kind": "settings", "table.rate": 1.0, "table.more.a": 2}
    assert unknown == {"kind": "other", "table.rate": 1.0, "table.more.a": 2}
