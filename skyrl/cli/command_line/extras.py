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
    distribution = installed()
    required = map(_REQUIREMENT.match, (distribution and distribution.requires) or ())
    extras = [match[2] for match in required if match and match[1].lower().replace("-", "_") == package]
    extras = [extra for extra in extras if extra not in _FOR_DEVELOPERS]
    if not extras:
        return None
    extra = "train" if "train" in extras else extras[0]
    return f"This needs the package {package}, which is not installed: {install_command(extra)}"
