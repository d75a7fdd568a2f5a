"""Keys of services, read from the environment of this process and never from a configuration, which is stored."""

from __future__ import annotations

import os


def api_key(name: str) -> str | None:
    """The key in the variable of this name, or None if it is not set."""
    return os.environ.get(name) or None
