"""Settings that another system reads only while a feature is on: without the feature they need nothing here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from attrs import frozen

from skyrl.interop.translation import Values, is_off
from skyrl.tree.types import display_value


@frozen
class Switch:
    """A setting of another system that turns a feature on, and the settings that only this feature reads."""

    key: str
    """Key of the setting. `*.` at its beginning stands for the table in which `settings` are found."""

    settings: tuple[str, ...]
    """Patterns of the settings that the feature reads. Each begins with `*.` if `key` does."""

    source: str
    """File and line of the other system where the feature is left out."""

    default: Any = False
    """Value of the switch in a file that omits it."""

    is_off: Callable[[Any], bool] = is_off
    """Whether a value turns the feature off."""

    def key_for(self, setting: str) -> str:
        """Key of the switch of a setting; empty if the setting is not one of this feature."""
        if not any(fnmatchcase(setting, pattern) for pattern in self.settings):
            return ""
        if not self.key.startswith("*."):
            return "" if setting == self.key else self.key
        heads = (setting.split(pattern.strip("*"), 1)[0] for pattern in self.settings if fnmatchcase(setting, pattern))
        key = next(heads) + self.key.removeprefix("*")
        return "" if setting == key else key


def other_than(*active: object) -> Callable[[object], bool]:
    """For a switch that is off unless it has one of the values `active`."""
    return lambda value: value not in active


def why_idle(setting: str, values: Values, switches: Iterable[Switch]) -> str:
    """Why a setting has no effect beside the others, `values`; empty if no switch is off."""
    for switch in switches:
        key = switch.key_for(setting)
        value = values.get(key, switch.default)
        if key and switch.is_off(value):
            return (
                f"only read with {key}, which is off"
                if is_off(value)
                else f"not read with {key} = {display_value(value)}"
            )
    return ""
