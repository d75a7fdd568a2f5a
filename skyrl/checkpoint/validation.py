"""Validation of a checkpoint's manifest. Digests detect accidental damage; these checks also detect forged manifests.

The `check_` functions raise `ValueError` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

LARGEST_MANIFEST = 64 << 20
LARGEST_HEADER = 100_000_000
"""Largest header of a safetensors file, in bytes; the library itself reads no larger one."""

_DIGEST = 32


def check_body(body: Mapping[str, Any]) -> None:
    """Checks the types of a manifest's fields. Raises `ValueError`, or `KeyError` for a missing field."""
    _expect(is_count(body["step"]), "its step is not a non-negative integer")
    _expect(is_count(body["schema_version"]), "its schema_version is not a non-negative integer")
    _expect(isinstance(body["fingerprint"], str), "its fingerprint is not a string")
    _expect(isinstance(body["config"], dict), "its config is not a table")
    derived = body["derived"]
    _expect(
        isinstance(derived, list) and all(isinstance(item, str) for item in derived),
        "its derived is not a list of paths",
    )
    _expect(
        _maps(body["world_size"], lambda ranks: is_count(ranks) and ranks > 0),
        "its world_size is not a table of positive integers",
    )
    _expect(_maps(body["versions"], lambda version: isinstance(version, str)), "its versions are not strings")
    _expect(_maps(body["metrics"], _is_finite), "its metrics are not finite numbers")
    _expect(isinstance(body["files"], dict), "its files are not a table")
    for name, of in body["files"].items():
        check_file(name, of)


def check_file(name: str, of: Any) -> None:
    """Checks the name, the size and the digest of a checkpoint's file."""
    parts = name.split("/")
    safe = all(part not in ("", ".", "..") for part in parts) and not set(name) & {"\\", "\0"}
    _expect(safe and name != "manifest.json", f"{name!r} is not the name of a file in the checkpoint")
    described = isinstance(of, dict) and is_count(of.get("size"))
    _expect(described, f"the size of {name} is not a non-negative integer")
    digest = of.get("xxh3_128")
    is_hexadecimal = isinstance(digest, str) and len(digest) == _DIGEST and not set(digest) - set("0123456789abcdef")
    _expect(is_hexadecimal, f"the digest of {name} is not an xxh3-128 digest")


def is_count(value: object) -> TypeGuard[int]:
    """Whether the value is a non-negative integer."""
    return type(value) is int and value >= 0


def are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether the value is a list of non-negative integers."""
    return isinstance(values, list) and all(map(is_count, values))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and type(value) in (int, float) and math.isfinite(value)


def _maps(value: object, to: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(to, value.values()))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
