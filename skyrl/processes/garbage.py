"""Garbage collection between steps, where few objects are alive, instead of in the middle of them.

A step of 4,096 samples makes a million objects that all live until it ends. Python's own thresholds would go through
them again and again, and each sample would cost three times as much as in a step of 128.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define

SELDOM = (100_000, 50, 100)
"""Thresholds inside a step: an object is looked at once or twice, and some 10 MB of cycles that were dropped wait for
it."""

SHARE = 0.01
"""Largest share of the time that full collections take."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect young objects seldom and old ones not at all until the block ends: for work that makes many objects that
    last. Also a decorator.
    """
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Exclude objects that were made before the block from garbage collection until the block ends.

    There are some 400,000 of them once torch and transformers are imported, and each full collection takes a fifth of a
    second.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@define
class Collections:
    """Collects garbage between the steps of a process; not at all where the process has turned collection off."""

    _full_at: float = 0.0
    """Time by `time.monotonic` from which a full collection is due."""

    def between_steps(self) -> None:
        """Collect what the last step made; everything once full collections have taken less than `SHARE` of the time,
        which bounds how long garbage can stay.
        """
        if not gc.isenabled():
            return
        began = time.monotonic()
        if began < self._full_at:
            gc.collect(1)
            return
        gc.collect()
        ended = time.monotonic()
        self._full_at = ended + (ended - began) / SHARE
