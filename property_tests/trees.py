"""Random values for every leaf of the tree, and random sets of overrides in every spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any, Literal, get_args, get_origin

import attrs
from hypothesis import strategies as st

from skyrl.config import SkyRLTrainConfig
from skyrl.tree import Secret
from skyrl.tree.classes import fields_of, fit_field, leaf_paths
from skyrl.tree.dump import stored_value
from skyrl.tree.types import NULL_WORDS, bare, is_list, is_mapping, is_optional, is_union

LEAVES: dict[str, attrs.Attribute[Any]] = dict(leaf_paths(SkyRLTrainConfig))

Overrides = dict[str, Any]
"""Dotted paths and values, as JSON has them."""

RUNNABLE: Overrides = {
    "trainer.device": "cpu",
    "trainer.logger": "console",
    "generator.inference_engine.backend": "torch",
}
"""What has to be written so that this version can run the default tree."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["1e5", "007", "true", "null", "none", "None", "nan", "a.b", "x = 1", "[y]", "#", '"', "'''", "\\"]
)
whole_numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 100)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.5, 1e-6])
scalars = st.booleans() | whole_numbers | numbers | texts
secrets = st.from_regex(r"\Aenv:[A-Z_]{1,8}\Z")


SIMPLE: tuple[Any, ...] = (None, 0, 1, 2, 8, 1000, -1, 0.5, 1e-6, 1.0, "a", "a.b:C", [0.5, 0.9])
"""What most leaves take one of."""


def data(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and tables of `leaves`, not too deep."""
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
    )


def overrides(*, max_size: int = 12, null_inside: bool = True) -> st.SearchStrategy[Overrides]:
    """Some leaves with values that they take; `null_inside` free-form tables cannot be written in TOML."""

    @st.composite
    def draw_them(draw: st.DrawFn) -> Overrides:
        paths = draw(st.lists(st.sampled_from(sorted(LEAVES)), unique=True, max_size=max_size))
        return {path: draw(value_of(path, null_inside=null_inside)) for path in paths}

    return draw_them()


@cache
def value_of(path: str, *, null_inside: bool = True) -> st.SearchStrategy[Any]:
    """A value that the leaf takes: any of its type; where its rule refuses that, the default or another simple one."""
    kind = LEAVES[path].type
    simple = [value for value in (default_of(LEAVES[path]), *SIMPLE) if takes(path, value)]

    @st.composite
    def draw_one(draw: st.DrawFn) -> Any:
        value = draw(_of_type(kind, null_inside))
        return value if takes(path, value) else deepcopy(draw(st.sampled_from(simple)))  # a test may change what it got

    return draw_one()


def default_of(attribute: attrs.Attribute[Any]) -> Any:
    """The default of a leaf as JSON has it."""
    return stored_value(attribute.default)


def takes(path: str, value: Any) -> bool:
    """Does the leaf take this value?"""
    attribute = LEAVES[path]
    try:
        stored = fit_field(attribute, value)
        if attribute.validator is not None:
            attribute.validator(None, attribute, stored)
    except ValueError:
        return False
    return True


def as_tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted paths as tables in tables."""
    tables: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    return tables


def as_toml_has_it(values: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null: the text `none` stands for it."""
    return {path: "none" if value is None else value for path, value in values.items()}


def as_arguments(values: Mapping[str, Any]) -> list[str]:
    """`path=value` for each."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]


def can_be_in_toml(path: str, value: Any) -> bool:
    """Null has no spelling where `none` is a word of the field's own."""
    return not (value is None and any("none" in get_args(arm) for arm in get_args(LEAVES[path].type)))


def can_be_an_argument(path: str, value: Any) -> bool:
    """The text `null` has no spelling where null may stand, nor has a text that looks like a list where one may."""
    kind = LEAVES[path].type
    if not isinstance(value, str) or not is_union(kind):
        return True
    lists = any(is_list(arm) for arm in get_args(kind))
    return not (is_optional(kind) and value in NULL_WORDS) and not (lists and value[:1] in ("[", "(", "'", '"'))


def _of_type(kind: Any, null_inside: bool) -> st.SearchStrategy[Any]:
    kind = bare(kind)
    if is_union(kind):
        return st.one_of([_of_type(arm, null_inside) for arm in get_args(kind)])
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if is_list(kind):
        return st.lists(_of_type(get_args(kind)[0], null_inside), max_size=3)
    if is_mapping(kind):
        return st.dictionaries(texts, data(scalars | st.none() if null_inside else scalars), max_size=3)
    if attrs.has(kind):
        fields = {attribute.name: _of_type(attribute.type, null_inside) for attribute in fields_of(kind).values()}
        if not null_inside:
            fields = {name: values.filter(lambda value: value is not None) for name, values in fields.items()}
        return st.fixed_dictionaries({}, optional=fields)
    by_kind = {bool: st.booleans(), int: whole_numbers, float: numbers | st.integers(0, 9), str: texts, Secret: secrets}
    return st.none() if kind is type(None) else by_kind[kind]
