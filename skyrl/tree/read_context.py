"""Context of reading: other files, the environment, classes to import, older names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from skyrl.errors import ConfigError, Problem
from skyrl.tree.masking import REFERENCE
from skyrl.tree.migrations import Migration
from skyrl.tree.origins import Assignment, Origin
from skyrl.tree.suggestions import Elsewhere, nothing_elsewhere
from skyrl.tree.types import holds_secret


class MissingVariable(ConfigError):
    """An environment variable that is not set. It is an error only if no later layer sets the value."""


@frozen(kw_only=True)
class ReadContext:
    """Everything that a user's own files and arguments may refer to; stored trees may refer to nothing."""

    environ: Mapping[str, str] | None = None
    """Variables that `env:NAME` may name. None: no environment was given."""

    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Name -> tables, for `extends = "preset:NAME"`."""

    migrations: tuple[Migration, ...] = ()
    """Older names of paths."""

    elsewhere: Elsewhere = nothing_elsewhere
    """What other systems call our fields, for suggestions."""

    is_open: bool = False
    """Whether references (`env:NAME`, `@file`, `class = "module:Name"` of a module not imported yet) are followed."""

    remembers: bool = False
    """Whether each table of the tree says which of its fields were written (`classes.written_fields`)."""

    def follows(self, origin: Origin | None) -> bool:
        """May references from this place be followed: a variable, a file, a class to import?"""
        return self.is_open and not (origin is not None and origin.is_stored)

    def filled(self, assignment: Assignment, kind: object) -> Assignment:
        """The assignment with `env:NAME` replaced by the variable's text, read as on a command line. A secret stays a
        reference.

        Raises `MissingVariable` if the variable is not set.
        """
        value = assignment.value
        found = REFERENCE.fullmatch(value) if isinstance(value, str) and self.follows(assignment.origin) else None
        if not found or holds_secret(kind):
            return assignment
        if self.environ is None:
            message, hint = (
                f"{value} needs environment variables, but none were passed",
                "load(..., environ=os.environ)",
            )
            raise MissingVariable([Problem(path="", message=message, hint=f"pass them: {hint}")])
        if found[1] not in self.environ:
            message, hint = f"{value}: this environment variable is not set", f"export {found[1]}=..."
            raise MissingVariable([Problem(path="", message=message, hint=hint)])
        origin = Origin(kind="environment", where=found[1], asked_by=assignment.origin)
        return evolve(assignment, value=self.environ[found[1]], origin=origin, is_text=True)


NOTHING = ReadContext()
"""Context for stored trees, which are pure data."""
