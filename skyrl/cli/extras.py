"""Packages that an installation without extras lacks, and how to install them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

_REQUIREMENT = re.compile(r"""([\w.-]+).*?;.*extra\s*==\s*["']([\w-]+)["']""")
_FOR_DEVELOPERS = ("dev", "bench")


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The message for a package that one of skyrl's extras installs; None for any other module."""
    package = (error.name or "").partition(".")[0]
    extras = _extras().get(package)
    if not extras:
        return None
    extra = "train" if "train" in extras else extras[0]
    return f"This needs the package {package}, which is not installed: pip install 'skyrl[{extra}]'"


def _extras() -> dict[str, list[str]]:
    """Module name -> the extras that install it."""
    found: dict[str, list[str]] = {}
    try:
        lines = requires("skyrl") or ()
    except PackageNotFoundError:
        return {}
    for line in lines:
        if (match := _REQUIREMENT.match(line)) and match[2] not in _FOR_DEVELOPERS:
            found.setdefault(match[1].lower().replace("-", "_"), []).append(match[2])
    return found
