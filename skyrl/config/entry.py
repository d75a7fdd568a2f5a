"""The entry points that SkyRL's users know: `from_cli_overrides`, `from_dict`, `get_config_as_dict`, ..."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, dataclass_transform

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree import field, frozen, to_dict
from skyrl.tree.builder import structure
from skyrl.tree.classes import is_config

T = TypeVar("T")


if TYPE_CHECKING:

    @attrs.frozen
    class _AttrsClass:
        """For type checkers alone: `attrs.evolve(config, ...)` takes any class of ours, and checks what it is given."""

else:
    _AttrsClass = object


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class BaseConfig(_AttrsClass):
    """Base class of every table of a configuration. Its subclasses are tables, too, with or without `@frozen`."""

    __slots__ = ()

    named_by: ClassVar[str] = ""
    """Field that a text in the place of this table is meant for; empty where there is none."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if any(is_config(base) for base in cls.__bases__):
            frozen(cls)

    @classmethod
    def from_dict_config(cls, values: Mapping[str, Any]) -> Self:
        """Nested values of the fields' own types, on top of the class's defaults; an OmegaConf `DictConfig`, too, whose
        interpolations are resolved. Raises `ConfigError`.
        """
        return structure(plain_tables(values), cls)

    def own_problems(self) -> Iterator[Problem]:
        """What does not go together among the fields of this table alone, with paths that begin at it.

        Its constructor refuses errors among them; in a file they are found by `check`, with everything else.
        """
        yield from ()

    def problems_at(self, path: str) -> Iterator[Problem]:
        """Problems of this table in a tree in which it stands at `path`."""
        for problem in self.own_problems():
            yield attrs.evolve(problem, path=f"{path}.{problem.path}")


def plain_tables(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """An OmegaConf `DictConfig` as plain data, its interpolations resolved; anything else as it is.

    Raises `ConfigError` for an interpolation that leads nowhere and for a mandatory value (`???`) that is missing.
    """
    omegaconf: Any = sys.modules.get("omegaconf")  # whoever has a DictConfig has imported it
    if omegaconf is None or not isinstance(values, omegaconf.DictConfig):
        return values
    try:
        plain: dict[str, Any] = omegaconf.OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        message = str(error).partition("\n")[0]
        raise ConfigError([Problem(path=str(error.full_key or ""), message=message)], title=_UNUSABLE) from None
    return plain


_UNUSABLE = "This OmegaConf configuration cannot be used"


def build_nested_dataclass(cls: type[T], values: Mapping[str, Any]) -> T:
    """`values` as an instance of a configuration class, on top of its defaults; SkyRL's name for `cattrs.structure`.

    Raises `ConfigError`.
    """
    return structure(plain_tables(values), cls)


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
        return cls._loaded(plain_tables(values))

    @classmethod
    def _loaded(cls, overrides: object) -> Self:
        [read] = _READ
        run: Self = read(overrides, cls)
        return run


_READ: list[Callable[[Any, Any], Any]] = []
"""Reader of overrides into the resolved tree of a class: `load.py` builds on this module, and sets it here."""


def reads_overrides(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Decorator of the one function that reads overrides into the resolved tree of a class."""
    _READ[:] = [function]
    return function


def get_config_as_dict(config: object) -> dict[str, Any]:
    """Every field as plain data, as JSON has it."""
    return to_dict(config)


def get_config_as_yaml_str(config: object) -> str:
    """The tree as YAML, which `load` reads back. Needs PyYAML."""
    from skyrl.tree.yaml_file import yaml_text

    return yaml_text(to_dict(config))
