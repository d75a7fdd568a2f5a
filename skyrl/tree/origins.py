"""Origins of values. Every source of values produces assignments, and each assignment carries its origin.

The chain of origins of a path, winner last, is kept beside the tree, so that the tree itself stays plain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import evolve, field, frozen

Path = tuple[str, ...]


def dotted(path: Path) -> str:
    """A path as a user writes it. Names with a dot, a space or the like are quoted, and so are names that end in a
    plus, since `list+=value` appends.
    """
    return ".".join(name if _BARE.fullmatch(name) else '"' + _SPECIAL.sub(r"\\\g<0>", name) + '"' for name in path)


_BARE = re.compile(r'[^."=\s]*[^."=\s+]')
_SPECIAL = re.compile(r'["\\]')


def cut_short(path: str) -> str:
    """A path as a message shows it."""
    return path if len(path) <= 400 else f"{path[:300]} ... {path[-50:]}"


class KeyLines:
    """Line numbers of a file's keys. The text is scanned when the first line is requested, which is rare."""

    def __init__(self, scan: Callable[[], Mapping[Path, int]]) -> None:
        self._scan = scan
        self._lines: Mapping[Path, int] | None = None

    def line_of(self, path: Path) -> int | None:
        """1-based line of the key, or of the innermost table or list around it that has one."""
        if not path:
            return None
        if self._lines is None:
            self._lines = self._scan()
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path)


@frozen(kw_only=True)
class Origin:
    """A place that gave a value; `location` is its form in messages."""

    kind: Literal["default", "preset", "file", "argument", "environment", "python", "rule"]
    where: str = ""
    """The preset, the file, the number of the argument, the variable, the line of Python, or the name of the rule. For
    a default: the place that reset the value to it."""

    reads: tuple[str, ...] = ()
    """Paths that a rule derived the value from."""

    path: Path = ()
    lines: KeyLines | None = field(default=None, eq=False, repr=False)
    """Lines of the file's keys."""

    requested_by: Origin | None = None
    """Place of the reference `env:NAME`, for an environment variable."""

    is_stored: bool = False
    """The file was stored by a run rather than written by hand: references in it are not followed."""

    value: Any = field(default=None, eq=False, repr=False)
    """Value that this origin gave, as stored in the tree."""

    def at(self, name: str) -> Origin:
        """The origin of a key inside the table, where this is the origin of the table."""
        return evolve(self, path=(*self.path, name))

    def giving(self, value: object) -> Origin:
        """A copy with the value that is now in the tree."""
        return evolve(self, value=value)

    @property
    def source(self) -> tuple[str, str]:
        """The layer of the origin: a file or preset by name; all arguments form one layer, as do values from Python."""
        layer = self.requested_by or self
        return layer.kind, layer.where if layer.kind in ("file", "preset") else ""

    @property
    def location(self) -> str:
        """`run.toml:14`, `argument 2`, `derived by <rule>`; empty for a default. Lines are looked up only here."""
        match self.kind:
            case "default":
                return self.where
            case "preset":
                return f"preset {self.where}"
            case "environment":
                return f"{self.requested_by.location if self.requested_by else ''} (env:{self.where})".strip()
            case "file":
                line = self.lines.line_of(self.path) if self.lines else None
                return f"{self.where}:{line}" if line else self.where
            case "argument":
                return f"argument {self.where}"
            case "rule":
                return f"derived by {self.where}"
            case "python":
                return self.where or "Python"


DEFAULT = Origin(kind="default")

Origins = Mapping[str, tuple[Origin, ...]]
"""Dotted path -> every origin that set it, winner last. A path that is absent has its default."""


@frozen(kw_only=True)
class Assignment:
    """`path = value`, from one place. A mapping assigned to a table merges into it; a list replaces a list."""

    path: Path
    value: Any
    origin: Origin
    is_text: bool = False
    """The value is command-line text, whose meaning depends on the type of the field."""

    operation: Literal["set", "append", "forget"] = "set"
    """append: add to the existing list; forget: discard what earlier layers wrote and return to the default."""

    def inside(self, name: str, value: object) -> Assignment:
        """The part of the assignment for the key `name` of its table."""
        return Assignment(path=(*self.path, name), value=value, origin=self.origin.at(name), operation=self.operation)

    def below(self, path: Path) -> Assignment:
        """The same assignment in a larger tree whose subtree at `path` it is for."""
        return evolve(self, path=(*path, *self.path))


def place_of(path: str, origins: Origins) -> str:
    """Place where the value at `path` was written, or else a value inside it, or else a table around it."""
    if path in origins:
        return origins[path][-1].location
    for known, chain in origins.items():
        if known.startswith(path + "."):
            return chain[-1].location
    while path := path.rpartition(".")[0]:
        if path in origins:
            return origins[path][-1].location
    return ""


def written_paths(origins: Origins) -> frozenset[str]:
    """Paths that were written explicitly, and every table around them."""
    paths: set[str] = set()
    for path, chain in origins.items():
        if any(origin.kind not in ("default", "rule") for origin in chain):
            while path and path not in paths:
                paths.add(path)
                path = path.rpartition(".")[0]
    return frozenset(paths)
