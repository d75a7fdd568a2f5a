"""One nested instance under construction: the original and its changes."""

from __future__ import annotations

from typing import Any

from skyrl.errors import ConfigError, Problem
from skyrl.tree.classes import class_name, fields_of, known_class
from skyrl.tree.frozen import thaw
from skyrl.tree.plain import shown


class Table:
    """A nested table under construction: its declared class, the instance it starts from, and the changes."""

    def __init__(self, declared: type[Any], base: object) -> None:
        self.declared = declared
        self.base = base
        self.changes: dict[str, Any] = {}
        self.is_forgotten = False
        """Whether a value inside was forgotten; distinguishes such a table from one written empty, which is kept."""
        self.was_absent = False
        """Whether the table did not exist before something was written in it."""
        self.unread = ""
        """Import path of its class, if that is not followed; see `imports.following`."""

    @property
    def cls(self) -> type[Any]:
        """The class of the instance under construction."""
        return type(self.base)

    def current(self, name: str) -> Any:
        """The value of a field, changed or not."""
        return self.changes[name] if name in self.changes else getattr(self.base, name)

    def child(self, name: str, declared: type[Any]) -> Table:
        """The nested table `name`, created from its current value, or from its class's defaults if that is None."""
        value = self.current(name)
        if not isinstance(value, Table):
            was_absent = value is None
            value = self.changes[name] = Table(declared, declared() if was_absent else value)
            value.was_absent = was_absent
        return value

    def drop_if_untouched(self, name: str) -> None:
        """Reset a table whose default is None to None if everything written in it has been forgotten."""
        child = self.changes.get(name)
        if isinstance(child, Table) and child.is_forgotten and not child.changes and getattr(self.base, name) is None:
            del self.changes[name]

    def mapping(self, name: str) -> dict[str, Any]:
        """The free-form table `name` in mutable form; empty if it was None."""
        value = self.current(name)
        made: dict[str, Any] = value if isinstance(value, dict) else thaw(value or {})
        self.changes[name] = made
        return made

    def become(self, name: object, *, may_import: bool) -> None:
        """Change to the class with this import path, the value of the key `class`. Values that differ from the defaults
        are kept.

        A module that is not imported yet is imported only if a user's own file or argument names it.
        """
        cls = known_class(name) if isinstance(name, str) else None
        if cls is None and isinstance(name, str) and may_import:
            from skyrl.tree.imports import follows, import_class  # few files name a class that is not imported yet

            if not follows("classes") and ":" in name:
                self.unread = name
                return
            cls = import_class(name)
        if cls is None or not issubclass(cls, self.declared):
            kind = "a subclass" if may_import else "an imported subclass"
            message = f"{shown(name)} is not {kind} of {class_name(self.declared)}"
            hint = "write module:Name or file.py:Name of a class decorated with @frozen" if may_import else ""
            raise ConfigError([Problem(path="", message=message, hint=hint)])
        self.changes = {key: change for key, change in self.changes.items() if key in fields_of(cls)}
        self.base = with_class(self.base, cls)


def with_class(table: object, cls: type[Any]) -> object:
    """An instance of another class in place of a table, with the values in which the table differs from its class's
    defaults.
    """
    default = type(table)()
    common = fields_of(cls).keys() & fields_of(type(table)).keys()
    return cls(**{key: getattr(table, key) for key in common if getattr(table, key) != getattr(default, key)})
