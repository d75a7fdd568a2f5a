"""Extending the tree: `make_config` replaces built-in tables by your own classes."""

import copyreg
from typing import Any, TypeVar, cast

from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.data import DataConfig
from skyrl.config.settings.environment import EnvironmentConfig
from skyrl.config.settings.generator import GeneratorConfig
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.trainer import TrainerConfig
from skyrl.tree import frozen
from skyrl.tree.classes import assembled, class_name, fields_of, known_class

C = TypeVar("C")
Tables = tuple[tuple[str, type[Any]], ...]
Recipe = type[Any] | tuple[Any, tuple[tuple[str, Any], ...]]
"""A class that a module holds, or the way one was made: the recipe of its base class, and of each table."""

_MADE: dict[tuple[type[Any], Tables], type[Any]] = {}
_RECIPES: dict[type[Any], Recipe] = {}


def make_config(
    *,
    algorithm_cls: type[AlgorithmConfig] | None = None,
    trainer_cls: type[TrainerConfig] | None = None,
    generator_cls: type[GeneratorConfig] | None = None,
    data_cls: type[DataConfig] | None = None,
    environment_cls: type[EnvironmentConfig] | None = None,
) -> type[SkyRLTrainConfig]:
    """The root class with your own tables, whose fields are then read, checked and stored like the built-in ones.

        @frozen
        class MyAlgorithm(AlgorithmConfig):
            bonus: float = 0.1

        MyRun = make_config(algorithm_cls=MyAlgorithm)

    The default of a table is its class's default instance. The same classes give the same root. Raises TypeError for a
    class that cannot replace the table.
    """
    if algorithm_cls is not None:
        trainer_cls = _subclass_with_tables(trainer_cls or TrainerConfig, (("algorithm", algorithm_cls),))
    tables = {"data": data_cls, "trainer": trainer_cls, "generator": generator_cls, "environment": environment_cls}
    return _subclass_with_tables(
        SkyRLTrainConfig, tuple((name, cls) for name, cls in tables.items() if cls is not None)
    )


def _subclass_with_tables(base: type[C], tables: Tables) -> type[C]:
    """The subclass of `base` in which each field named in `tables` has the class given there."""
    if not tables:
        return base
    if (base, tables) not in _MADE:
        _MADE[base, tables] = _make(base, tables)
    return _MADE[base, tables]


def _make(base: type[C], tables: Tables) -> type[C]:
    for name, cls in tables:
        declared = fields_of(base)[name].type
        if not issubclass(cls, cast("type[Any]", declared)):
            raise TypeError(f"{cls.__name__} cannot be the table {name}: it is not derived from {declared}")
        if known_class(class_name(cls)) is not cls:
            raise TypeError(f"{cls.__name__} lacks the decorator @frozen: its own fields would be ignored")
    name = f"{base.__name__}With" + "And".join(cls.__name__ for _, cls in tables)
    body = {"__doc__": base.__doc__, "__annotations__": dict(tables)} | {table: cls() for table, cls in tables}
    subclass = frozen(cast("type[C]", type(name, (base,), body)))
    _RECIPES[subclass] = (_recipe(base), tuple((table, _recipe(cls)) for table, cls in tables))
    copyreg.pickle(subclass, _taken_apart)  # no module holds the class, so its pickles carry its recipe
    return subclass


def _recipe(cls: type[Any]) -> Recipe:
    return _RECIPES.get(cls, cls)


def _follow(recipe: Recipe) -> type[Any]:
    if isinstance(recipe, type):
        return recipe
    base, tables = recipe
    return _subclass_with_tables(_follow(base), tuple((name, _follow(table)) for name, table in tables))


def _taken_apart(config: object) -> tuple[Any, ...]:
    return _put_together, (_recipe(type(config)), {name: getattr(config, name) for name in fields_of(type(config))})


def _put_together(recipe: Recipe, values: dict[str, Any]) -> object:
    return assembled(_follow(recipe)(), values)
