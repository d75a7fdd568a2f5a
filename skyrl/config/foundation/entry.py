"""The entry points that SkyRL's users know: `from_cli_overrides`, `from_dict`, `get_config_as_dict`, ..."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, dataclass_transform

import attrs

from skyrl.errors import ConfigError, Problem
from skyrl.tree import field, frozen, joined, to_dict
from skyrl.tree.builder import structure
from skyrl.tree.classes import is_config
from skyrl.tree.dump import stored_value

T = TypeVar("T")


if TYPE_CHECKING:

    @attrs.frozen
    class _AttrsClass:
        """For type checkers only: lets `attrs.evolve(config, ...)` accept every configuration class and check its
        arguments.
        """

else:
    _AttrsClass = object


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class BaseConfig(_AttrsClass):
    """Base class of every table of a configuration. Its subclasses are tables as well, with or without `@frozen`."""

    __slots__ = ()

    named_by: ClassVar[str] = ""
    """Field that receives a string written where this table belongs; empty if there is none."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if any(is_config(base) for base in cls.__bases__):
            frozen(cls)

    @classmethod
    def from_dict_config(cls, values: Mapping[str, Any]) -> Self:
        """An instance from nested values of the fields' types, on top of the class's defaults. Accepts an OmegaConf
        `DictConfig` and resolves its interpolations. Raises `ConfigError`.
        """
        return structure(plain_tables(values), cls)

    def own_problems(self) -> Iterator[Problem]:
        """Contradictions among the fields of this table alone, with paths relative to it.

        The constructor raises for errors among them; in a file, `check` reports them with all other problems.
        """
        yield from ()

    def problems_at(self, path: str) -> Iterator[Problem]:
        """Problems of this table at `path` in a tree."""
        for problem in self.own_problems():
            yield attrs.evolve(problem, path=f"{path}.{problem.path}")


class LocatedConfig(BaseConfig):
    """A table that has one place in the files of a run, so that a message can name its fields."""

    __slots__ = ()

    table_path: ClassVar[str] = ""
    """Dotted path of the table; empty for the root."""

    def path_of(self, field: str) -> str:
        """Dotted path of a field of the table in the user's own file, such as `trainer.device` for `device`."""
        return joined(self.table_path, field)


def plain_tables(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """An OmegaConf `DictConfig` as plain data, its interpolations resolved; anything else as it is.

    Raises `ConfigError` for an interpolation that leads nowhere and for a mandatory value (`???`) that is missing.
    """
    omegaconf: Any = sys.modules.get("omegaconf")  # a DictConfig only exists once it is imported
    if omegaconf is None or not isinstance(values, omegaconf.DictConfig):
        return values
    try:
        plain: dict[str, Any] = omegaconf.OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        problem = Problem(path=str(error.full_key or ""), message=str(error).partition("\n")[0])
        raise ConfigError([problem], title="This OmegaConf configuration cannot be used") from None
    return plain


def build_nested_dataclass(cls: type[T], values: Mapping[str, Any]) -> T:
    """`values` as an instance of a configuration class, on top of its defaults; SkyRL's name for `cattrs.structure`.

    Raises `ConfigError`.
    """
    return structure(plain_tables(values), cls)


class RunConfig(BaseConfig):
    """Constructors of a whole run. Each returns the resolved tree, because SkyRL's tree also carries derived values."""

    __slots__ = ()

    def __repr__(self) -> str:
        """A line for each value that differs from the default."""
        from skyrl.tree.display import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        """A table of what was written and derived, as notebooks show it."""
        from skyrl.tree.display import as_html

        return as_html(self)

    @classmethod
    def from_cli_overrides(cls, overrides: Sequence[str] | Mapping[str, Any]) -> Self:
        """`["trainer.epochs=2"]` as on a command line, or `{"trainer.epochs": 2}`. Raises `ConfigError`."""
        return cls._loaded(overrides)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Nested tables, dotted paths, or both; an OmegaConf `DictConfig`, too. Raises `ConfigError`."""
        return cls._loaded(plain_tables(values))

    @classmethod
    def from_dict_config(cls, values: Mapping[str, Any]) -> Self:
        """The same as `from_dict`, under the name that SkyRL gives it. Raises `ConfigError`."""
        return cls.from_dict(values)

    @classmethod
    def _loaded(cls, overrides: Sequence[str] | Mapping[str, Any]) -> Self:
        # The loader imports the trees, which are built on this module, so it is imported by its name and only here.
        loader: Any = import_module("skyrl.config.loading.load")
        resolver: Any = import_module("skyrl.config.loading.resolve")
        run: Self = resolver.resolve(loader.load([], overrides, cls))
        return run


def get_config_as_dict(config: object) -> dict[str, Any]:
    """Every field as plain data that JSON can represent. A mapping is copied: tables become dicts, tuples become lists,
    configurations in it plain data, and interpolations of a `DictConfig` are resolved.
    """
    if isinstance(config, Mapping):
        plain: dict[str, Any] = stored_value(plain_tables(config))
        return plain
    return to_dict(config)


def get_config_as_yaml_str(config: object) -> str:
    """The same as YAML, which `load` reads back. Needs PyYAML."""
    from skyrl.tree.yaml_file import yaml_text

    return yaml_text(get_config_as_dict(config))
