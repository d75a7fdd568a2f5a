"""AReaL's `allocation_mode`, such as `sglang.d16p1m1+d8p2m1`: who gets how many GPUs, and how they share the model.

A part is a backend and degrees: d data, p pipeline, t or m tensor, c context, e expert; the first part generates, the
second trains.
"""

from __future__ import annotations

import re

from attrs import frozen

_PART = re.compile(r"(?:(?P<backend>[a-z]+)[.:])?(?P<degrees>(?:[dptmce]\d+)+)")


@frozen(kw_only=True)
class Part:
    """One side of the cluster."""

    backend: str
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all ranks; experts are spread over ranks that exist anyway."""
        return self.data * self.pipeline * self.tensor * self.context


def read_allocation(text: str) -> tuple[Part, Part] | None:
    """The generating and the training part; None where the text has another form."""
    parts = [_read(each) for each in text.split("+")]
    if len(parts) != 2 or parts[0] is None or parts[1] is None:
        return None
    return parts[0], parts[1]


def read_training(text: str) -> Part | None:
    """The one part of a run that generates nothing; None where the text has another form."""
    return _read(text)


def _read(text: str) -> Part | None:
    found = _PART.fullmatch(text.strip())
    if not found:
        return None
    names = {"d": "data", "p": "pipeline", "t": "tensor", "m": "tensor", "c": "context", "e": "expert"}
    degrees = {names[letter]: int(number) for letter, number in re.findall(r"([dptmce])(\d+)", found["degrees"])}
    return Part(backend=found["backend"] or "", **degrees)
