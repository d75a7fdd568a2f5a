"""Searches for garbage that leave out what lasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Objects that were made before the block are not searched for garbage in it, but after it.

    There are some 400,000 once torch and transformers are imported, and each full search, every 20 steps or so of the
    quick start, takes a fifth of a second.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
