"""How this installation came about, from which the install commands in messages are made.

The distribution is `skyrl-attrs`: on the package index, `skyrl` is another project, whose package has the same name. A
message that named either would install something else than what runs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__version__ = "0.2.0.dev0"

DISTRIBUTION = "skyrl-attrs"
FORMER = "skyrl"
"""Name of this distribution until it was changed, and of another project on the package index."""

_COMMAND = "skyrl.cli:start"


def install_command(*extras: str) -> str:
    """The shell command that installs this package with the extras, from where it was installed: a checkout, a folder,
    a wheel, an address, or an index (PEP 610). By uv where uv installed it.
    """
    return f"{_installer(installed())} install {_requirement(installed(), ','.join(extras))}"


def package_command(package: str) -> str:
    """The shell command that installs another package beside this one."""
    return f"{_installer(installed())} install {package}"


def installed() -> Distribution | None:
    """The metadata of this installation; None for a checkout that runs without being installed."""
    from importlib import metadata  # imported late: it takes a tenth of the start of a short command

    for name in (DISTRIBUTION, FORMER):
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            if any(point.value == _COMMAND for point in distribution.entry_points):
                return distribution
    return None


def conflict() -> str:
    """A warning if `skyrl-attrs` and `skyrl` are both installed, with the remedy; empty if they are not."""
    if not {DISTRIBUTION, FORMER} <= set(_names()):
        return ""
    remove = f"{_installer(installed())} uninstall {FORMER} {DISTRIBUTION}"
    return (
        f"The distributions {DISTRIBUTION}, which is this one, and {FORMER} are both installed, and their files "
        f"replace each other's. Remove both, then install this one again: {remove} && {install_command()}"
    )


def _names() -> Iterator[str]:
    """Names of the installed distributions. Only names of folders are read, which takes less than a millisecond."""
    for folder in sys.path:
        if folder.endswith("-packages"):  # site-packages, and Debian's dist-packages
            with suppress(OSError):
                for name in os.listdir(folder):
                    if name.endswith(".dist-info"):
                        yield name.partition("-")[0].replace("_", "-").lower()


def _installer(distribution: Distribution | None) -> str:
    return "uv pip" if distribution and (distribution.read_text("INSTALLER") or "").strip() == "uv" else "pip"


def _requirement(distribution: Distribution | None, extras: str) -> str:
    """The requirement that the command installs, quoted for the shell."""
    from urllib.parse import unquote, urlsplit

    extras = f"[{extras}]" if extras else ""
    origin = _origin(distribution)
    url, checkout = origin.get("url", ""), Path(__file__).parents[1]
    if not url and (checkout / "pyproject.toml").is_file():
        return f"-e {shlex.quote(f'{checkout}{extras}')}"
    if url.startswith("file:") and "vcs_info" not in origin:
        is_editable = origin.get("dir_info", {}).get("editable", False)
        return f"{'-e ' if is_editable else ''}{shlex.quote(unquote(urlsplit(url).path) + extras)}"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    if inside := origin.get("subdirectory"):
        url = f"{url}#subdirectory={inside}"
    return shlex.quote(f"{DISTRIBUTION}{extras}" + (f" @ {url}" if url else ""))


def _origin(distribution: Distribution | None) -> dict[str, Any]:
    """The content of `direct_url.json`, which installers leave for everything that is not from an index."""
    import json

    with suppress(ValueError):
        origin: dict[str, Any] = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
        return origin
    return {}
