"""Trees as data: complete dictionaries, differences, fingerprints.

Importing `skyrl.tree` registers our classes, and only ours, with cattrs' global converter: `cattrs.unstructure(config)`
returns a complete JSON-able dictionary, and `cattrs.structure(data, cls)` reads it back by the same rules as a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import cattrs

from skyrl.tree.builder import structure
from skyrl.tree.classes import class_name, fields_of, is_config, resume_role, tables_of
from skyrl.tree.masking import masked
from skyrl.tree.types import Secret, class_of

SCHEMA_VERSION = 1
"""Version of the stored form; it goes into every fingerprint."""


def to_dict(config: object) -> dict[str, Any]:
    """Every field as plain data. A subclass used in place of its base class is named under the key `class`."""
    return _dump(config, type(config)(), stored_value)


def public_dict(config: object) -> dict[str, Any]:
    """`to_dict` without secrets: what may be printed, stored and sent."""
    return _dump(config, type(config)(), public_value)


def _dump(config: object, start: object, leaf: Callable[[object], object]) -> dict[str, Any]:
    """Every field as plain data, with the class if it differs from that of `start`, with which reading begins."""
    data: dict[str, Any] = {}
    tables = tables_of(type(config))
    for name in fields_of(type(config)):
        value, default = getattr(config, name), getattr(start, name)
        nested = tables.get(name)
        if nested is None or value is None:
            data[name] = leaf(value)
            continue
        default = nested() if default is None else default
        if type(default) is type(value):
            data[name] = _dump(value, default, leaf)
        else:
            data[name] = {"class": class_name(type(value)), **_dump(value, type(value)(), leaf)}
    return data


def stored_value(value: object) -> Any:
    """The value of a leaf in its JSON form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: stored_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [stored_value(item) for item in value]
    return cattrs.unstructure(value)  # a nested configuration, or a third-party type with a hook


def public_value(value: object) -> object:
    """The value of a leaf in its JSON form, without secrets.

    A field that holds a secret has the type `Secret`: its name decides nothing. Names of keys do in free-form tables,
    which nobody declares, and so does the form of a text, such as a password in an address.
    """
    if is_config(type(value)):
        return public_dict(value)
    if isinstance(value, list | tuple):
        return [public_value(item) for item in value]
    return masked(stored_value(value))


def fingerprint(config: object) -> str:
    """sha256 of what determines a run's results: `identity` and `numerics` fields and the schema version, as JSON."""
    import hashlib

    kept = flatten(config, ("identity", "numerics"))
    return hashlib.sha256(_canonical({"schema": SCHEMA_VERSION, "fields": kept}).encode()).hexdigest()


def flatten(
    config: object,
    roles: Collection[str] = ("identity", "numerics", "free"),
    leaf: Callable[[object], object] = stored_value,
) -> dict[str, Any]:
    """Dotted path -> plain value of every leaf whose role is in `roles`; a table that is None appears as one entry.
    `leaf` gives the form of a value.
    """
    flat: dict[str, Any] = {}

    def spread(value: object, path: str) -> None:
        """Add the leaves of a free-form table, which are the same whether or not its class is known."""
        if isinstance(value, dict) and value:
            for key, item in value.items():
                spread(item, f"{path}.{key}")
        else:
            flat[path] = value

    def visit(table: object, prefix: str) -> None:
        for name, attribute in fields_of(type(table)).items():
            value = getattr(table, name)
            if class_of(attribute.type):
                if resume_role(attribute) in roles:
                    spread(leaf(value), prefix + name)
            elif attrs.has(type(value)):
                visit(value, f"{prefix}{name}.")
            elif resume_role(attribute) in roles:
                flat[prefix + name] = leaf(value)

    visit(config, "")
    return flat


def differences(
    before: object, after: object, roles: Collection[str] = ("identity", "numerics", "free")
) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (value before, value after) where value or type differ; a missing value shows as None."""
    old, new = flatten(before, roles), flatten(after, roles)
    return {
        path: (old.get(path), new.get(path))
        for path in dict.fromkeys([*old, *new])
        if not same(old.get(path), new.get(path))
    }


def same(one: object, other: object) -> bool:
    """Are two plain values equal in value and type? 1, 1.0 and true are three values."""
    return one is other or _canonical(one) == _canonical(other)


def _canonical(value: object) -> str:
    import json

    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def short_json(value: object) -> str:
    """A plain value as JSON of at most 60 characters, for a message."""
    import json

    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


cattrs.register_unstructure_hook_func(is_config, to_dict)
cattrs.register_structure_hook_func(is_config, structure)
cattrs.register_unstructure_hook(Secret, str)
cattrs.register_structure_hook(Secret, lambda value, _: Secret.read(value))
