"""The entry points that SkyRL's users know: `from_cli_overrides`, `from_dict`, `get_config_as_dict`, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from skyrl.tree import to_dict
from skyrl.tree.builder import structure


class BaseConfig:
    """What any table of a configuration may be derived from: with `@frozen`, a class of one's own is one of ours."""

    __slots__ = ()

    @classmethod
    def from_dict_config(cls, values: Mapping[str, Any]) -> Self:
        """Nested values of the fields' own types, on top of the class's defaults. Raises `ConfigError`."""
        return structure(values, cls)


class RunConfig(BaseConfig):
    """The constructors of a whole run. Each returns the resolved tree, since SkyRL's carries derived values, too."""

    __slots__ = ()

    @classmethod
    def from_cli_overrides(cls, overrides: Sequence[str] | Mapping[str, Any]) -> Self:
        """`["trainer.epochs=2"]` as on a command line, or `{"trainer.epochs": 2}`. Raises `ConfigError`."""
        return cls._loaded(overrides)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Nested tables, dotted paths, or both. Raises `ConfigError`."""
        return cls._loaded(values)

    @classmethod
    def _loaded(cls, overrides: Any) -> Self:
        [read] = _READ
        run: Self = read(overrides, cls)
        return run


_READ: list[Callable[[Any, Any], Any]] = []
"""What reads overrides into the resolved tree of a class: `load.py` builds on this module, and puts it here."""


def reads_overrides(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Decorator of the one function that reads overrides into the resolved tree of a class."""
    _READ[:] = [function]
    return function


def get_config_as_dict(config: Any) -> dict[str, Any]:
    """Every field as plain data, as JSON has it."""
    return to_dict(config)


def get_config_as_yaml_str(config: Any) -> str:
    """The same as YAML, which `load` reads back. Needs PyYAML."""
    from skyrl.tree.yaml_file import yaml_text

    return yaml_text(to_dict(config))
