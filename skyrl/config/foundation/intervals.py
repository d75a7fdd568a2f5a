"""How often something happens: after steps, epochs or seconds, whichever is due first.

ckpt_interval = 10
ckpt_interval = "1 epoch"
ckpt_interval = [100, "30m"]
"""

from __future__ import annotations

import re

from attrs import frozen

from skyrl.tree.types import SECONDS, TypeMismatch
from skyrl.tree.validators import rule_of_one_field

Interval = int | str | tuple[int | str, ...]
"""Steps as a number; `"10 steps"`, `"1 epoch"`, `"30m"`; or several of them. -1 and 0: never."""

_COUNT = re.compile(r"([0-9]+)\s*(step|epoch)s?")


@frozen(kw_only=True)
class ParsedInterval:
    """A parsed interval. None: this unit does not count; if all are None, the interval never comes."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @property
    def ever(self) -> bool:
        """Whether the interval ever comes."""
        return (self.steps, self.epochs, self.seconds) != (None, None, None)


def read_interval(value: Interval) -> ParsedInterval:
    """The interval described by the field. Raises ValueError for text that is no interval, and for a repeated unit."""
    numbers: dict[str, float] = {}
    for part in value if isinstance(value, tuple) else (value,):
        kind, number = _part(part)
        if kind in numbers:
            raise ValueError(f"two intervals in {kind}")
        if number > 0:
            numbers[kind] = number
    return ParsedInterval(
        steps=int(numbers["steps"]) if "steps" in numbers else None,
        epochs=int(numbers["epochs"]) if "epochs" in numbers else None,
        seconds=numbers.get("seconds"),
    )


def _part(part: int | str) -> tuple[str, float]:
    if isinstance(part, int):
        if part < -1:
            raise ValueError(f"{part} is below -1")
        return "steps", part
    if counted := _COUNT.fullmatch(part.strip()):
        return f"{counted[2]}s", int(counted[1])
    seconds = SECONDS.read(part)
    if seconds is None:
        raise ValueError(f"{part!r} has no unit")
    return "seconds", seconds


def _is_interval(value: Interval) -> bool:
    try:
        read_interval(value)
    except (ValueError, TypeMismatch):
        return False
    return True


interval = rule_of_one_field(
    _is_interval,
    'an interval: steps (10), "1 epoch", a time ("30m"), a list of these, or -1 for never',
    minimum=-1,
)
