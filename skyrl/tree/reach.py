"""What reading may look at besides the values: other files, the environment, classes to import, older names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from skyrl.tree.migrations import Migration


@frozen(kw_only=True)
class Reach:
    """A user's own files and arguments may reach all of it; a stored tree reaches nothing."""

    environ: Mapping[str, str] | None = None
    """Variables that `env:NAME` may name. None: none was handed over."""

    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Name -> tables, for `extends = "preset:NAME"`."""

    migrations: tuple[Migration, ...] = ()
    """Older names of paths."""

    is_open: bool = False
    """References (`env:NAME`, `@file`, `class = "module:Name"` of a module not imported yet) are followed."""


NOTHING = Reach()
"""For trees that were stored: they are data and nothing else."""
