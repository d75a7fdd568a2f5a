"""Arguments that are made up fit the schema that they are made from."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from skyrl.envs.example_arguments import example_of

SCHEMAS: list[tuple[dict[str, Any], object]] = [
    ({}, "text"),
    ({"type": "string"}, "text"),
    ({"type": "string", "maxLength": 2}, "te"),
    ({"type": "string", "minLength": 6}, "texttt"),
    ({"type": "integer"}, 1),
    ({"type": "integer", "minimum": 7}, 7),
    ({"type": "number", "minimum": 0.5, "maximum": 0.75}, 0.75),
    ({"type": "number", "exclusiveMinimum": 4}, 5),
    ({"type": "integer", "maximum": -2}, -2),
    ({"type": "boolean"}, True),
    ({"type": "null"}, None),
    ({"type": ["integer", "null"]}, 1),
    ({"enum": ["a", "b"]}, "a"),
    ({"const": 5}, 5),
    ({"type": "integer", "default": 9}, 9),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 1]),
    ({"type": "array", "items": True}, ["text"]),
    ({"type": "object", "properties": {"a": True}, "required": ["a"]}, {"a": "text"}),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]},
        {"a": 1},
    ),
]


@pytest.mark.parametrize(("schema", "value"), SCHEMAS)
def test_a_value_is_of_the_kind_that_the_schema_describes(schema: dict[str, Any], value: object) -> None:
    assert example_of(schema) == value
    Draft202012Validator(schema).validate(value)
