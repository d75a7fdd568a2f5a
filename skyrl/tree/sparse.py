"""Reduces a tree to what was written and what differs from the default, as nested plain data: the form in which users
write one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from skyrl.errors import ConfigError, Problem
from skyrl.tree.builder import with_class
from skyrl.tree.classes import class_name, fields_of, known_class, table_class, written_fields
from skyrl.tree.dump import same, stored_value
from skyrl.tree.types import bare, class_of, config_class, is_list, is_optional, item_kind, lists_none


def sparse(
    config: object,
    default: object = None,
    leave_out: Iterable[str] = (),
    leaf: Callable[[object], object] = stored_value,
) -> dict[str, Any]:
    """Nested data that, patched onto the default tree, gives `config`. Values are in JSON form, nulls included.

    What somebody wrote is in it even where it is the default, since a rule may derive another value for a field that is
    left out. The differences are from the default *instance*, which may differ from a nested class's own defaults.
    `leave_out` are dotted paths to drop, such as derived ones; `leaf` gives the form of a value.
    """
    return _sparse(config, type(config)() if default is None else default, "", frozenset(leave_out), leaf)


def as_toml_has_it(data: Mapping[str, Any], of: object) -> dict[str, Any]:
    """Nested data with the text `none` for null where the field may be null; `of` is the tree that the data is of, or
    its class where there is no tree.

    Where TOML cannot express null, one that is the field's default is left out. Raises `ConfigError` for any other:
    inside free-form tables, and where `none` is a value of the field itself.
    """
    problems: list[Problem] = []
    default, tree = (of(), None) if isinstance(of, type) else (type(of)(), of)
    converted = _replace_nulls(data, default, tree, "", problems)
    if problems:
        raise ConfigError(problems, title="TOML has no null")
    return converted


def _sparse(
    config: object, default: object, prefix: str, left_out: frozenset[str], leaf: Callable[[object], object]
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    written = written_fields(config) or ()
    for name, attribute in fields_of(type(config)).items():
        path, value, before = prefix + name, getattr(config, name), getattr(default, name, None)
        if path in left_out:
            continue
        nested = table_class(attribute, value)
        if nested is not None and config_class(attribute.type) is None:  # its class is named by another field
            data |= {name: inner} if (inner := _sparse(value, nested(), path + ".", left_out, leaf)) else {}
        elif nested is None or value is None:
            if name in written or not same(stored_value(value), stored_value(before)):
                data[name] = leaf(value)
        elif type(before) is type(value):
            data |= {name: inner} if (inner := _sparse(value, before, path + ".", left_out, leaf)) else {}
        else:
            start = nested()
            is_other = type(value) is not (type(before) if before is not None else type(start))
            named = {"class": class_name(type(value))} if is_other else {}
            start = with_class(start if before is None else before, type(value)) if is_other else start
            inner = _sparse(value, start, path + ".", left_out, leaf)
            data[name] = named | inner
    return data


def _replace_nulls(
    data: Mapping[str, Any], default: object, tree: object, prefix: str, problems: list[Problem]
) -> dict[str, Any]:
    named = known_class(str(data.get("class")))
    default = default if named is None or isinstance(default, named) else named()
    fields = fields_of(type(default))
    converted: dict[str, Any] = {}
    for name, value in data.items():
        attribute, path = fields.get(name), prefix + name
        before, current = getattr(default, name, None), getattr(tree, name, None)
        nested = table_class(attribute, current) if attribute else None
        if isinstance(value, Mapping) and nested is not None:
            start = before if isinstance(before, nested) else nested()
            converted[name] = _replace_nulls(value, start, current, path + ".", problems)
        elif attribute and isinstance(value, list) and (table := _table_in(attribute.type)):
            converted[name] = [_drop_default_nulls(item, table) for item in value]
        elif attribute and class_of(attribute.type) and tree is None:  # its class, if any, reads `none` as null
            converted[name] = _word_for_null(value)
        elif value is None and attribute and is_optional(attribute.type) and not lists_none(attribute.type):
            converted[name] = "none"
        elif not (value is None and attribute and before is None):
            message = "is null, which TOML cannot express here"
            hint = "leave the entry out; only YAML and JSON files have null"
            problems += (Problem(path=null, message=message, hint=hint) for null in _nulls(value, path))
            converted[name] = value
    return converted


def _table_in(kind: object) -> type[Any] | None:
    """The class of the tables in a list; None for any other type."""
    return config_class(item_kind(bare(kind))) if is_list(bare(kind)) else None


def _drop_default_nulls(item: Mapping[str, Any], table: type[Any]) -> dict[str, Any]:
    """A table without what is null by default, which reads the same."""
    fields = fields_of(table)
    return {name: value for name, value in item.items() if value is not None or fields[name].default is not None}


def _word_for_null(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _word_for_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_word_for_null(item) for item in value]
    return "none" if value is None else value


def _nulls(value: object, path: str) -> Iterable[str]:
    if value is None:
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nulls(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _nulls(item, f"{path}.{index}")
