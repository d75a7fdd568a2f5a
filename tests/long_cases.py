"""Matrices of which `make test` runs a few cases and `make test-long` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_except(cases: Iterable[Any], *default: Any) -> list[Any]:
    """Parameters for all `cases`, marked `long` unless they are among `default`."""
    known = list(cases)
    unknown = [case for case in default if case not in known]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in default else pytest.param(case, marks=pytest.mark.long) for case in known]
