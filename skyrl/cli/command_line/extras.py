"""Packages that an installation without extras lacks, and how to install them."""

from __future__ import annotations

import importlib.util
import re

from skyrl.errors import UserError
from skyrl.installation import install_command, installed

_REQUIREMENT = re.compile(r"""([\w.-]+).*?;.*extra\s*==\s*["']([\w-]+)["']""")
_FOR_DEVELOPERS = ("dev", "bench")


def require_packages(command: str, extra: str, *modules: str) -> None:
    """Raise `UserError` if a command lacks modules that an extra installs."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise UserError(f"{command} needs {', '.join(missing)}: {install_command(extra)}")


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The message for a package that one of skyrl's extras installs; None for any other module."""
    package = (error.name or "").partition(".")[0]
    extras = _extras().get(package)
    if not extras:
        return None
    extra = "train" if "train" in extras else extras[0]
    return f"This needs the package {package}, which is not installed: {install_command(extra)}"


def _extras() -> dict[str, list[str]]:
    """Module name -> the extras that install it."""
    extras: dict[str, list[str]] = {}
    distribution = installed()
    for line in (distribution and distribution.requires) or ():
        if (match := _REQUIREMENT.match(line)) and match[2] not in _FOR_DEVELOPERS:
            extras.setdefault(match[1].lower().replace("-", "_"), []).append(match[2])
    return extras
