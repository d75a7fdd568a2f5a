"""The decorator of every configuration class, and what can be asked about one: its fields, their types, docs and roles.

    @frozen
    class SamplingParams:
        temperature: float = field(default=1.0, validator=non_negative)
        \"\"\"Softmax temperature, unitless. 0 is greedy.\"\"\"

`frozen` is `attrs.frozen(kw_only=True)` whose every field has a converter that freezes the value and refuses one that
does not fit the field's type, so that `OptimizerConfig(lr="fast")` fails in Python as it does in a file.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Literal, TypeVar, cast, dataclass_transform

import attrs
from attrs import field

from skyrl.errors import ConfigError, Problem
from skyrl.tree.plain import Misfit
from skyrl.tree.types import config_class, fit

C = TypeVar("C")
Role = Literal["identity", "numerics", "free"]

IDENTITY = {"role": "identity"}
"""Metadata of a field that says which run this is: another value makes it another run."""

FREE = {"role": "free"}
"""Metadata of a field that changes no number of the run: it may differ on resume and is not in the fingerprint."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[C]) -> type[C]:
    """Make `cls` an immutable configuration class (see the module's docstring).

    Every field has a default, since files are patches of the default instance. Raises TypeError for one that has none.
    """
    made: type[C] = attrs.frozen(kw_only=True, field_transformer=_with_exact_types)(cls)
    _MADE.add(made)
    _BY_NAME[class_name(made)] = made
    return made


def is_config(kind: Any) -> bool:
    """Was this class made by `frozen`, or derived from one that was?"""
    return isinstance(kind, type) and not _MADE.isdisjoint(kind.__mro__)


def class_name(cls: type[Any]) -> str:
    """`module:Name`, the form in which a stored configuration names a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def known_class(name: str) -> type[Any] | None:
    """The configuration class that `module:Name` names, if its module has been imported; never imports anything."""
    return _BY_NAME.get(name)


def fields_of(cls: type[Any]) -> dict[str, attrs.Attribute[Any]]:
    """Fields by name, in order, with their types resolved."""
    if cls not in _FIELDS:
        types = _types_of(cls)
        _FIELDS[cls] = {each.name: each.evolve(type=types[each.name]) for each in attrs.fields(cls)}
    return _FIELDS[cls]


def role_of(attribute: attrs.Attribute[Any]) -> Role:
    """What a change of this field means on resume: another run, other numbers, or nothing."""
    role: Role = attribute.metadata.get("role", "numerics")
    return role


def docs_of(cls: type[Any]) -> dict[str, str]:
    """The string literal below each field, by field name, those of the parent classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_config(base):
            docs |= _own_docs(base)
    return docs


def leaf_paths(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, attrs.Attribute[Any]]]:
    """Every dotted path that holds a value, with its field; optional sub-tables are entered too."""
    for name, attribute in fields_of(cls).items():
        nested = config_class(attribute.type)
        if nested is None:
            yield prefix + name, attribute
        else:
            yield from leaf_paths(nested, f"{prefix}{name}.")


def table_paths(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """Every dotted path that holds a nested table."""
    for name, attribute in fields_of(cls).items():
        nested = config_class(attribute.type)
        if nested is not None:
            yield prefix + name
            yield from table_paths(nested, f"{prefix}{name}.")


_MADE: set[type[Any]] = set()
_BY_NAME: dict[str, type[Any]] = {}
_FIELDS: dict[type[Any], dict[str, attrs.Attribute[Any]]] = {}


def _with_exact_types(cls: type[Any], attributes: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    for attribute in attributes:
        if attribute.default is attrs.NOTHING:
            raise TypeError(f"{cls.__name__}.{attribute.name} needs a default")
        if cast(Any, attribute).inherited and attribute.name in vars(cls):
            raise TypeError(f"{cls.__name__}.{attribute.name} needs a type: write {attribute.name}: <type> = <default>")
    return [
        attribute if cast(Any, attribute).inherited else attribute.evolve(converter=_exact(cls, attribute))
        for attribute in attributes
    ]


def _exact(cls: type[Any], attribute: attrs.Attribute[Any]) -> Any:
    before = cast("Callable[[Any], Any] | None", attribute.converter)
    kind: Any = attribute.type

    def convert(value: Any) -> Any:
        nonlocal kind
        if isinstance(kind, str):  # the module postpones its annotations
            kind = _types_of(cls)[attribute.name]
        try:
            return fit(before(value) if before else value, kind)
        except Misfit as misfit:
            problem = Problem(path=attribute.name, message=str(misfit), hint=misfit.hint)
            raise ConfigError([problem], title=f"{cls.__name__} cannot be built") from None

    return convert


def _types_of(cls: type[Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise TypeError(
            f"a field of {cls.__qualname__} is annotated with {error.name}, which its module does not hold at run "
            "time: define or import it at the top of the module, outside of TYPE_CHECKING"
        ) from None


def _own_docs(cls: type[Any]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # made in an interactive session: it has no source
        return {}
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)).body
    return {
        above.target.id: inspect.cleandoc(below.value.value)
        for above, below in pairwise(body)
        if isinstance(above, ast.AnnAssign)
        and isinstance(above.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
