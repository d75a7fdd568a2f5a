"""Where a value came from. Every source hands over assignments, and each assignment carries its origin from the start.

The chain of origins of a path, winner last, is kept beside the tree, so that the tree itself stays plain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import evolve, field, frozen

from skyrl.errors import ConfigError, Problem

Path = tuple[str, ...]


def dotted(path: Path) -> str:
    """A path as a person writes it: names that hold a dot, a space or the like stand in quotes, and so does one that
    ends in a plus, since `list+=value` appends.
    """
    return ".".join(name if _BARE.fullmatch(name) else '"' + _SPECIAL.sub(r"\\\g<0>", name) + '"' for name in path)


_BARE = re.compile(r'[^."=\s]*[^."=\s+]')
_SPECIAL = re.compile(r'["\\]')


MOST_NAMES = 80
"""Names that a path may have: those of the tree's tables, and as many levels as a free-form value may have."""

MOST_LETTERS = 1000
"""Characters that one name of a path may have."""


def check_length(path: Path) -> None:
    """Raises `ConfigError` for a path that no person has written: it takes time that grows with its square."""
    if len(path) > MOST_NAMES:
        message = f"this path has {len(path)} names, and a path has at most {MOST_NAMES}"
    elif path and len(path[-1]) > MOST_LETTERS:  # the names before it were checked with the tables that they name
        message = f"this name has {len(path[-1])} characters, and a name has at most {MOST_LETTERS}"
    else:
        return
    raise ConfigError([Problem(path="", message=message)])


def cut_short(path: str) -> str:
    """A path as a message shows it."""
    return path if len(path) <= 400 else f"{path[:300]} ... {path[-50:]}"


class KeyLines:
    """On which line of a file each key stands. The text is scanned when the first line is asked for: few ask."""

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
    """A place that gave a value; `place` is its form in messages."""

    kind: Literal["default", "preset", "file", "argument", "environment", "python", "rule"]
    where: str = ""
    """The preset, the file, the number of the argument, the variable, the line of Python, or the name of the rule. For
    a default: the place that asked for it back."""

    reads: tuple[str, ...] = ()
    """Paths that a rule derived the value from."""

    path: Path = ()
    lines: KeyLines | None = field(default=None, eq=False, repr=False)
    """Lines of the file's keys."""

    asked_by: Origin | None = None
    """Place of the reference `env:NAME`, for an environment variable."""

    is_stored: bool = False
    """The file is one that a run stored, not one that a person wrote: nothing that it names is followed."""

    value: Any = field(default=None, eq=False, repr=False)
    """Value that this origin gave, once it stands in the tree."""

    def at(self, name: str) -> Origin:
        """The origin of a key inside the table that this is the origin of."""
        path = (*self.path, name)
        return Origin(
            kind=self.kind,
            where=self.where,
            path=path,
            lines=self.lines,
            asked_by=self.asked_by,
            is_stored=self.is_stored,
        )

    def giving(self, value: object) -> Origin:
        """A copy with the value that stands in the tree now."""
        return Origin(
            kind=self.kind,
            where=self.where,
            reads=self.reads,
            path=self.path,
            lines=self.lines,
            asked_by=self.asked_by,
            is_stored=self.is_stored,
            value=value,
        )

    @property
    def source(self) -> tuple[str, str]:
        """What gave it as one layer: a file or preset by name; all arguments are one, and so are values from Python."""
        layer = self.asked_by or self
        return layer.kind, layer.where if layer.kind in ("file", "preset") else ""

    @property
    def place(self) -> str:
        """`run.toml:14`, `argument 2`, `derived by <rule>`; empty for a default. Lines are looked up only here."""
        match self.kind:
            case "default":
                return self.where
            case "preset":
                return f"preset {self.where}"
            case "environment":
                return f"{self.asked_by.place if self.asked_by else ''} (env:{self.where})".strip()
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
    """append: add to the list that is there; forget: drop what earlier layers wrote, back to the default."""

    def inside(self, name: str, value: object) -> Assignment:
        """The part of it that goes to the key `name` of the table it is about."""
        return Assignment(path=(*self.path, name), value=value, origin=self.origin.at(name), operation=self.operation)

    def below(self, path: Path) -> Assignment:
        """The same for the tree that stands at `path`."""
        return evolve(self, path=(*path, *self.path))


def place_of(path: str, origins: Origins) -> str:
    """Place where the value at `path` was written: that of the path, of something in it, or of a table around it."""
    if path in origins:
        return origins[path][-1].place
    for known, chain in origins.items():
        if known.startswith(path + "."):
            return chain[-1].place
    while path := path.rpartition(".")[0]:
        if path in origins:
            return origins[path][-1].place
    return ""


def written_paths(origins: Origins) -> frozenset[str]:
    """Paths that a person wrote, and every table around them."""
    found: set[str] = set()
    for path, chain in origins.items():
        if any(origin.kind not in ("default", "rule") for origin in chain):
            while path and path not in found:
                found.add(path)
                path = path.rpartition(".")[0]
    return frozenset(found)
