"""The variables of a script: what it sets, what it is called with, and what would come from outside."""

from __future__ import annotations

from attrs import define, evolve, field

from skyrl.interop.shell.unknown import unknown

LONGEST = 100_000
"""Largest number of characters in a value: variables that repeat each other grow without bound."""

Array = dict[str, str]
"""Items of an array by their index or key, in order."""

_OF_THE_SHELL = (
    "RANDOM", "SECONDS", "LINENO", "BASHPID", "PPID", "UID", "EUID", "HOSTNAME", "BASH_VERSION", "PWD", "OLDPWD",
    "BASH_SOURCE", "FUNCNAME", "SRANDOM", "EPOCHSECONDS", "OSTYPE", "HOSTTYPE", "PIPESTATUS",
)  # fmt: skip
"""Variables that Bash itself sets, to what only running the script would tell."""


class TooLong(ValueError):
    """A script whose values or loops grow without bound."""


@define
class Variables:
    """What names stand for at one point of a script."""

    values: dict[str, str | Array | None] = field(factory=dict)
    """None for a variable that the script itself removed."""

    arguments: tuple[str, ...] = ()
    """Arguments of the function that runs; a script is read as if it were called without any."""

    in_function: bool = False
    keyed: set[str] = field(factory=set)
    """Arrays that `declare -A` made: their keys are texts."""

    assumed: dict[str, str] = field(factory=dict)
    """Variables from outside that were assumed to be unset -> what the script makes of that. Shared by all copies."""

    def copy(self) -> Variables:
        """The same variables, to be changed apart."""
        arrays = {name: dict(value) if isinstance(value, dict) else value for name, value in self.values.items()}
        return evolve(self, values=arrays, keyed=set(self.keyed))

    def get(self, name: str) -> str | None:
        """The value of a variable or an argument; None if it is not set. What the script does not set is unknown,
        unless it was assumed to be unset.
        """
        if name.isascii() and name.isdigit() and int(name):
            if int(name) <= len(self.arguments):
                return self.arguments[int(name) - 1]
            return None if self.in_function or f"${name}" in self.assumed else unknown(f"${name}")
        value = self.values.get(name)
        if isinstance(value, dict):
            return value.get("0", unknown(f"$({name})") if name not in self.keyed and not value else "")
        if name not in self.values and name not in self.assumed:
            return unknown(f"$({name})" if name in _OF_THE_SHELL or name in "?$!-_" else f"${name}")
        return value

    def is_outside(self, name: str) -> bool:
        """Whether the variable would come from outside of the script."""
        return name not in self.values and name not in _OF_THE_SHELL

    def items(self, name: str) -> list[str]:
        """The items of an array, or of the arguments for `@`."""
        if name in ("@", "*"):
            return list(self.arguments)
        value = self.values.get(name)
        if isinstance(value, dict):
            return list(value.values())
        text = self.get(name)
        return [] if text is None else [text]

    def set(self, name: str, value: str, *, adds: bool = False) -> None:
        """Set a variable. Raises `TooLong`."""
        before = self.values.get(name) or ""
        if isinstance(before, dict):
            self.set_item(name, "0", value, adds=adds)
            return
        value = before + value if adds else value
        if len(value) > LONGEST:
            raise TooLong(f"the value of {name}")
        self.values[name] = value

    def set_array(self, name: str, items: Array, *, adds: bool = False) -> None:
        """Set an array, or add items to it. Raises `TooLong`."""
        before = self.values.get(name) or {}
        array = (before if isinstance(before, dict) else {"0": before}) if adds else {}
        for key, value in items.items():
            array[str(len(array)) if adds and name not in self.keyed else key] = value
        if sum(map(len, array.values())) > LONGEST:
            raise TooLong(f"the value of {name}")
        self.values[name] = array

    def set_item(self, name: str, key: str, value: str, *, adds: bool) -> None:
        """Set one item of an array."""
        array = self.values.get(name)
        if not isinstance(array, dict):
            array = self.values[name] = {"0": array} if array else {}
        array[key] = array.get(key, "") + value if adds else value

    def assume_unset(self, name: str, becomes: str) -> None:
        """Assume that a variable from outside is not set, in which case the script does what `becomes` says."""
        self.assumed[name] = self.assumed.get(name) or becomes
