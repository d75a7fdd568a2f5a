"""A tree as JSON Schema (draft 2020-12), with which an editor completes, explains and checks a file during typing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import attrs

from skyrl.tree.classes import docs_of, fields_of, is_config, names_of, table_class
from skyrl.tree.dump import stored_value
from skyrl.tree.files import EXTENDS
from skyrl.tree.masking import REFERENCE
from skyrl.tree.types import (
    NULL_WORDS,
    Secret,
    bare,
    is_mapping,
    is_union,
    item_kind,
    list_arm,
    takes_one_text,
    unit_of,
)
from skyrl.tree.validators import bounds_of, requirement_of

_ENVIRONMENT = "FromEnvironment"
_REFERENCE = {
    "description": "The value of an environment variable, read as on a command line.",
    "type": "string",
    "pattern": f"^{REFERENCE.pattern}$",
}
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}
_TEXT = {"type": "string"}
_ONE_TEXT = {**_TEXT, "minLength": 1, "not": {"enum": list(NULL_WORDS)}}
"""Text that is a list of one."""

_EXTENDS = {
    "description": "What this file extends: another file (path relative to this one), preset:NAME, or a list of these.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}
_CLASS = {
    "description": "The subclass to use for this table, as module:Name or file.py:Name. `skyrl config schema FILE` "
    "prints a schema with its fields.",
    "type": "string",
}


def json_schema(root: type[Any], instance: object = None) -> dict[str, Any]:
    """The schema of files for `root`: each class once under `$defs`, with its fields' docs. Every key is optional.

    `instance` is a tree whose tables' classes, possibly user-defined, replace the declared ones.
    """
    definitions: dict[str, Any] = {}
    _define(root() if instance is None else instance, definitions)
    definitions[root.__name__]["properties"][EXTENDS] = _EXTENDS
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": f"#/$defs/{root.__name__}",
        "$defs": dict(sorted({**definitions, _ENVIRONMENT: _REFERENCE}.items())),
    }


def _define(table: object, definitions: dict[str, Any]) -> None:
    cls = type(table)
    if cls.__name__ in definitions:
        return
    definitions[cls.__name__] = {}
    docs, defaults, properties = docs_of(cls), cls(), {}
    for name, attribute in fields_of(cls).items():
        described = _field_schema(attribute, getattr(table, name), definitions)
        allowed = requirement_of(attribute.validator)
        rule = f"Not {allowed}." if allowed.startswith("allowed ") else f"Allowed: {allowed}." if allowed else ""
        described["description"] = " ".join(filter(None, [docs.get(name), rule]))
        if table_class(attribute, getattr(table, name)) is None:
            described["default"] = stored_value(getattr(defaults, name))
        properties[name] = described
    definitions[cls.__name__] = {
        "type": "object",
        "description": inspect.getdoc(cls) or "",
        "properties": {**properties, "class": _CLASS},
        "additionalProperties": False,
    }


def _field_schema(attribute: attrs.Attribute[Any], value: object, definitions: dict[str, Any]) -> dict[str, Any]:
    nested = table_class(attribute, value)
    item = item_kind(list_arm(attribute.type))
    if nested is None and is_config(item):
        _define(item(), definitions)
        return {"type": "array", "items": {"$ref": f"#/$defs/{item.__name__}"}}
    if nested is None:
        described = _or_environment(_type_schema(attribute.type, bounds_of(attribute.validator)))
        return _add_names(described, names_of(attribute))
    inner: Any = nested() if value is None else value
    _define(inner, definitions)
    reference = {"$ref": f"#/$defs/{type(inner).__name__}"}
    return {"anyOf": [reference, _type_schema(type(None), {})]} if is_union(attribute.type) else reference


def _add_names(described: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The schema whose texts are one of the names, which an editor then suggests, or have a colon, as import paths and
    `env:NAME` have.
    """
    if not names:
        return described
    if described in (_TEXT, _ONE_TEXT):
        return {"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": ":"}]}
    if "items" in described:
        return {**described, "items": _add_names(described["items"], names)}
    arms = described.get("anyOf")
    return {**described, "anyOf": [_add_names(arm, names) for arm in arms]} if arms else described


def _or_environment(described: dict[str, Any]) -> dict[str, Any]:
    """The schema extended by `env:NAME`, which every field accepts."""
    arms = described.get("anyOf", [described])
    takes_text = any(arm == {} or (arm.get("type") == "string" and "pattern" not in arm) for arm in arms)
    is_secret = any(arm.get("pattern") == _REFERENCE["pattern"] for arm in arms)
    return described if takes_text or is_secret else {"anyOf": [*arms, {"$ref": f"#/$defs/{_ENVIRONMENT}"}]}


def _type_schema(kind: object, bounds: Mapping[str, Any]) -> dict[str, Any]:
    unit, kind = unit_of(kind), bare(kind)
    if unit:
        text = {"type": "string", "pattern": unit.pattern, "description": f"with a unit, such as {unit.example}"}
        return {"anyOf": [_type_schema(kind, {**bounds, "maximum": unit.most}), text]}
    if kind is Secret:
        return {"type": "string", "pattern": f"^{REFERENCE.pattern}$"}
    if kind in _SCALARS:
        takes = {str: {"pattern"}, bool: set()}.get(kind, bounds.keys() - {"pattern"})
        return {"type": _SCALARS[kind], **{name: bound for name, bound in bounds.items() if name in takes}}
    if kind is type(None):
        return {"enum": [None, "none"]}  # TOML has no null and writes `"none"` instead
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if is_union(kind):
        return {"anyOf": [_type_schema(arm, bounds) for arm in get_args(kind)]}
    if get_origin(kind) is tuple:
        items = _type_schema(get_args(kind)[0], {})
        several = {"type": "array", "items": items}
        return {"anyOf": [several, _ONE_TEXT if items == _TEXT else items]} if takes_one_text(kind) else several
    if is_mapping(kind):
        _, values = get_args(kind) or (str, Any)
        return {"type": "object", **({} if values is Any else {"additionalProperties": _type_schema(values, {})})}
    return {}
