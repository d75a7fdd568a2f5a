"""Arguments made up from a JSON schema, with which `skyrl doctor --call-tools` calls a tool before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_WHOLE_NUMBER, _TEXT = 1, "text"


def example_of(schema: Mapping[str, Any] | bool) -> object:
    """A value that the schema describes, as far as its types, bounds and choices are followed; a pattern, a format or
    a reference is not. Whether it fits is for the caller to check.
    """
    if not isinstance(schema, Mapping):  # true, which anything fits
        return _TEXT
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return example_of(schema[key][0])
    types = schema.get("type")
    match types[0] if isinstance(types, list) and types else types:
        case "string":
            return _TEXT[: schema.get("maxLength", len(_TEXT))].ljust(schema.get("minLength", 0), "t")
        case "integer" | "number":
            return _number(schema)
        case "boolean":
            return True
        case "array":
            return [example_of(schema.get("items", {})) for _ in range(max(1, schema.get("minItems", 1)))]
        case "object":
            fields = schema.get("properties", {})
            return {name: example_of(fields.get(name, {})) for name in schema.get("required", ())}
    return None if types == "null" else _TEXT


def _number(schema: Mapping[str, Any]) -> float:
    """A whole number within the bounds, or the lower bound if that is none."""
    number: float = max(_WHOLE_NUMBER, math.ceil(schema.get("minimum", _WHOLE_NUMBER)))
    if "exclusiveMinimum" in schema:
        number = max(number, math.floor(schema["exclusiveMinimum"]) + 1)
    most: float = schema.get("maximum", number)
    return min(number, most)
