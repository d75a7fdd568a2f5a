"""Refuses what needs Linux on another system: processes are watched and confined by means that it alone has."""

from __future__ import annotations

import sys

from skyrl.errors import UserError

PLATFORM = sys.platform

ANYWHERE = ("config", "plan", "simulate", "completion")
"""Commands that only compute texts and numbers, on every system."""


def needs_linux(feature: str) -> None:
    """Raise `UserError` on another system than Linux."""
    if PLATFORM != "linux":
        others = f"{', '.join(ANYWHERE[:-1])} and {ANYWHERE[-1]}"
        remedy = f"use a Linux machine, WSL or a container (docs/installing.md). Here, skyrl {others} work."
        raise UserError(f"{feature} needs Linux, and this is {PLATFORM}: {remedy}")
