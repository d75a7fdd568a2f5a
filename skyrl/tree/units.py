"""Numbers written with a unit: `"10m"` in a field of seconds, `"8GiB"` in a field of gigabytes.

    start_timeout_seconds: Seconds = 600.0

The field holds the plain number. A number without a unit is in the unit of the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

from attrs import frozen

from skyrl.tree.frozen import FrozenDict
from skyrl.tree.plain import TypeMismatch, shown

N = TypeVar("N", int, float)

_TEXT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]+)")


@frozen(kw_only=True)
class Unit:
    """Unit of a field, and the units in which it may be written: name -> factor to the field's unit."""

    name: str
    example: str
    factors: Mapping[str, float]
    most: float = 1e9
    """Largest value of a field: 31 years, and an exabyte. Beyond it, clocks and counts of bytes overflow."""

    @property
    def pattern(self) -> str:
        """Regular expression, in JSON Schema syntax, for the text that `read` accepts."""
        return rf"^\s*{_TEXT.pattern.replace('[A-Za-z]+', '|'.join(self.factors))}\s*$"

    def read(self, text: str) -> float | None:
        """The value of `text` in this unit; None if the text has no unit. Raises `TypeMismatch` for an unknown unit."""
        found = _TEXT.fullmatch(text.strip())
        if not found:
            return None
        if found[2] not in self.factors:
            known = ", ".join(self.factors)
            raise TypeMismatch(
                f"{shown(text)} is not a number of {self.name}", hint=f"units: {known}; for example {self.example}"
            )
        return round(float(found[1]) * self.factors[found[2]], 12)

    def within(self, number: N) -> N:
        """The number, if it is not implausibly large. Raises `TypeMismatch`."""
        if number > self.most:
            raise TypeMismatch(f"{shown(number)} is more than {self.most:.0f} {self.name}, the limit")
        return number


SECONDS = Unit(
    name="seconds",
    example='"90s" or "10m"',
    factors=FrozenDict({"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}),
)
GIGABYTES = Unit(
    name="gigabytes",
    example='"512MB" or "2GiB"',
    factors=FrozenDict(
        {
            "B": 1e-9, "KB": 1e-6, "MB": 1e-3, "GB": 1.0, "TB": 1e3,
            "KiB": 2**10 / 1e9, "MiB": 2**20 / 1e9, "GiB": 2**30 / 1e9, "TiB": 2**40 / 1e9,
        }
    ),
)  # fmt: skip

Seconds = Annotated[float, SECONDS]
WholeSeconds = Annotated[int, SECONDS]
Gigabytes = Annotated[float, GIGABYTES]
