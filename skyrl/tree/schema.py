"""A tree as JSON Schema (draft 2020-12): with it an editor completes, explains and checks a file as it is written."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args, get_origin

from skyrl.tree.classes import docs_of, fields_of
from skyrl.tree.frozen import thaw
from skyrl.tree.types import config_class, is_mapping, is_union

_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}


def json_schema(root: type[Any]) -> dict[str, Any]:
    """The schema of files for `root`: each class once under `$defs`, with its fields' docs. Every key is optional."""
    definitions: dict[str, Any] = {}
    _define(root, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": f"#/$defs/{root.__name__}",
        "$defs": dict(sorted(definitions.items())),
    }


def _define(cls: type[Any], definitions: dict[str, Any]) -> None:
    if cls.__name__ in definitions:
        return
    definitions[cls.__name__] = {}
    docs, defaults = docs_of(cls), cls()
    properties = {}
    for name, attribute in fields_of(cls).items():
        described = _of_type(attribute.type, definitions) | {"description": " ".join(docs.get(name, "").split())}
        if config_class(attribute.type) is None:
            described["default"] = thaw(getattr(defaults, name))
        properties[name] = described
    definitions[cls.__name__] = {
        "type": "object",
        "description": inspect.getdoc(cls) or "",
        "properties": properties,
        "additionalProperties": False,
    }


def _of_type(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    nested = None if is_union(kind) else config_class(kind)
    if nested is not None:
        _define(nested, definitions)
        return {"$ref": f"#/$defs/{nested.__name__}"}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if kind is type(None):
        return {"enum": [None, "none"]}  # TOML has no null, so there `"none"` stands for it
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if is_union(kind):
        return {"anyOf": [_of_type(arm, definitions) for arm in get_args(kind)]}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _of_type(get_args(kind)[0], definitions)}
    return {"type": "object"} if is_mapping(kind) else {}
