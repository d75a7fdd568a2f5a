"""Groups of trajectories as JSON that restores them exactly, with a notation for values that JSON cannot express.

A group is the object that its class describes, field by field: `{"prompt": {...}, "trajectories": [...], ...}`. Floats
are written so that they are restored bit for bit; non-finite ones are the strings `nan`, `inf` and `-inf`, and bytes
are in base64. In a prompt's `extras`, which may hold any values of a dataset, other types are objects with one key:
`{"$bytes": "..."}`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from math import isfinite
from typing import Any

from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from skyrl.errors import RunError
from skyrl.trajectory import Prompt, TokenRow, Trajectory, TrajectoryGroup

SCHEMA = 1
"""Version of the line format. It rises when a reader of an older version would misread the lines."""

_WORDS: tuple[tuple[type, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    # type, key, and functions to encode and decode it; the first type that matches is used
    (bytes, "$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    (datetime, "$datetime", datetime.isoformat, datetime.fromisoformat),
    (date, "$date", date.isoformat, date.fromisoformat),
    (time, "$time", time.isoformat, time.fromisoformat),
    (Decimal, "$decimal", str, Decimal),
    (float, "$float", str, float),
)


def as_object(group: TrajectoryGroup) -> dict[str, Any]:
    """The group as an object for `json.dumps`. Raises `RunError` for a column of the dataset that cannot be written."""
    plain: dict[str, Any] = _CONVERTER.unstructure(group)
    return plain


def group_of(plain: Mapping[str, Any]) -> TrajectoryGroup:
    """The group that `as_object` wrote, equal in every field. Raises `ValueError` (from cattrs) for anything else."""
    return _CONVERTER.structure(plain, TrajectoryGroup)


def encoded(value: object) -> Any:
    """The value as JSON has it, for `decoded`. Raises `RunError` for a type that has no notation here."""
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, Mapping):
        items = {key: encoded(item) for key, item in value.items()}
        words = [str(key) for key in items if str(key).startswith("$") or not isinstance(key, str)]
        return {"$items": [[encoded(key), item] for key, item in items.items()]} if words else items
    if isinstance(value, tuple):
        return {"$tuple": [encoded(element) for element in value]}
    if isinstance(value, list):
        return [encoded(entry) for entry in value]
    for kind, word, write, _ in _WORDS:
        if isinstance(value, kind):
            return {word: write(value)}
    raise RunError(
        f"a column of the data has a value of type {type(value).__name__}, which cannot be written with a recording "
        "(trainer.recording) or the checkpoint of an asynchronous run: leave the column out"
    )


def decoded(value: object) -> Any:
    """The value that `encoded` wrote."""
    if isinstance(value, list):
        return [decoded(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        [(word, content)] = value.items()
        if word == "$items":
            return {decoded(key): decoded(element) for key, element in content}
        if word == "$tuple":
            return tuple(decoded(item) for item in content)
        for _, known, _, read in _WORDS:
            if word == known:
                return read(content)
    return {key: decoded(item) for key, item in value.items()}


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(float, lambda value: value if isfinite(value) else str(value))
    converter.register_structure_hook(float, lambda value, _: float(value))
    converter.register_unstructure_hook(bytes, lambda value: base64.b64encode(value).decode())
    converter.register_structure_hook(bytes, lambda value, _: base64.b64decode(value))
    extras = override(unstruct_hook=encoded, struct_hook=lambda value, _: decoded(value))
    converter.register_unstructure_hook(Prompt, make_dict_unstructure_fn(Prompt, converter, extras=extras))
    converter.register_structure_hook(
        Prompt, make_dict_structure_fn(Prompt, converter, _cattrs_forbid_extra_keys=True, extras=extras)
    )
    for kind in (TokenRow, Trajectory):  # rows seldom carry anything: nothing is written of those that do not
        omit = override(omit_if_default=True)
        seldom: dict[str, Any] = {"extras": omit} | ({"feedback": omit} if kind is Trajectory else {})
        converter.register_unstructure_hook(kind, make_dict_unstructure_fn(kind, converter, **seldom))
    return converter


_CONVERTER = _converter()
