"""Secrets: a configuration says where a secret is stored, never its value.

    token: Secret | None = None        # token = "env:JUDGE_TOKEN"

A component reads the variable when it needs the secret: `config.token.reveal(environ)`. Printed and stored data is
masked by `skyrl.tree.masking`.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.errors import ConfigError, Problem
from skyrl.tree.masking import REFERENCE, SHOWN
from skyrl.tree.plain import TypeMismatch


class Secret:
    """The name of the environment variable that holds a secret. It is printed and stored as `*** (env:NAME)`, which
    reads back as the same reference.
    """

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Secret is immutable")

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self.name))

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (self.name,)

    @classmethod
    def read(cls, value: object) -> Secret:
        """A secret from `env:NAME`, or from its masked form. Raises `TypeMismatch`, which never contains the value."""
        if isinstance(value, cls):
            return value
        found = isinstance(value, str) and (REFERENCE.fullmatch(value) or SHOWN.fullmatch(value))
        if not found:
            raise TypeMismatch(
                "a secret cannot be written in the configuration itself",
                hint='write "env:NAME" to read it from a variable',
            )
        return cls(found[1])

    def reveal(self, environ: Mapping[str, str]) -> str:
        """Value of the variable. Raises `ConfigError` if it is not set."""
        if not environ.get(self.name):
            message = "this environment variable, which must hold a secret, is not set or is empty"
            raise ConfigError([Problem(path=self.name, message=message)])
        return environ[self.name]

    def __repr__(self) -> str:
        return f"*** (env:{self.name})"

    __str__ = __repr__
