"""The decorator of every configuration class, and what can be asked about one: its fields, their types, docs and roles.

    @frozen
    class SamplingParams:
        temperature: float = field(default=1.0, validator=non_negative)
        \"\"\"Softmax temperature, unitless. 0 is greedy.\"\"\"

`frozen` is `attrs.frozen(kw_only=True)` whose constructor freezes every value and refuses those that do not fit their
fields' types, so that `OptimizerConfig(lr="fast")` fails in Python as it does in a file.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, TypeVar, cast, dataclass_transform

import attrs
from attrs import field

from skyrl.errors import ConfigError, Problem, UnknownFieldError
from skyrl.tree.names import nearest
from skyrl.tree.types import ClassOf, TypeMismatch, class_of, coerce_exact, config_class, remembered

C = TypeVar("C")
ResumeRole = Literal["identity", "numerics", "free"]
"""Effect of a change of a field on resume. `numerics`, the default, is a field that changes numbers of the run: it may
differ on resume only on request, and is in the fingerprint.
"""

IDENTITY = {"role": "identity"}
"""Metadata of a field that identifies the run: a different value makes it a different run."""

FREE = {"role": "free"}
"""Metadata of a field that changes no number of the run: it may differ on resume and is not in the fingerprint."""


def choice_metadata(role: Mapping[str, str], names: Iterable[str]) -> dict[str, Any]:
    """Metadata of a field with a role, which holds one of these names or an import path."""
    return {**role, "names": tuple(names)}


def names_of(attribute: attrs.Attribute[Any]) -> tuple[str, ...]:
    """The names that a field knows, besides import paths; empty for most fields."""
    names: tuple[str, ...] = attribute.metadata.get("names", ())
    return names


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[C]) -> type[C]:
    """Make `cls` an immutable configuration class (see the module's docstring).

    Every field needs a default, since files are patches of the default instance; that of a table is its class's, if it
    gives none. Raises TypeError for another field without one.
    """
    if "__configuration__" in vars(cls):  # its base class has already decorated it
        return cls
    options: Any = {"init": False, "eq": False, "repr": False, "slots": False}
    frozen_class: type[C] = attrs.frozen(kw_only=True, field_transformer=_checked_fields, **options)(cls)
    for name, method in _SHARED_METHODS.items():
        if not any(name in vars(base) for base in cls.__mro__[:-1] if base is cls or not is_config(base)):
            setattr(frozen_class, name, method)
    cast(Any, frozen_class).__configuration__ = True  # a mark on the class, which it keeps in another process
    _BY_NAME[class_name(frozen_class)] = frozen_class
    return frozen_class


def is_config(kind: object) -> bool:
    """Was this class made by `frozen`, or derived from one that was?"""
    return isinstance(kind, type) and hasattr(kind, "__configuration__")


def table_class(attribute: attrs.Attribute[Any], value: object) -> type[Any] | None:
    """The class of the table that the field holds: the one it declares, or that of an instance in a table of `ClassOf`;
    None for a leaf.
    """
    if class_of(attribute.type) and is_config(type(value)):
        return type(value)
    return config_class(attribute.type)


def class_name(cls: type[Any]) -> str:
    """`module:Name`, the form in which a stored configuration names a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def known_class(name: str) -> type[Any] | None:
    """The configuration class that `module:Name` names, if its module has been imported; never imports anything."""
    return _BY_NAME.get(name)


@remembered
def fields_of(cls: type[Any]) -> dict[str, attrs.Attribute[Any]]:
    """Fields by name, in order, with their types resolved."""
    types = _types_of(cls)
    return {
        attribute.name: attribute
        if attribute.type is types[attribute.name]
        else attribute.evolve(type=types[attribute.name])
        for attribute in attrs.fields(cls)
    }


@remembered
def tables_of(cls: type[Any]) -> Mapping[str, type[Any]]:
    """The classes of the fields that hold nested tables, by name, in order."""
    classes = {name: config_class(attribute.type) for name, attribute in fields_of(cls).items()}
    return {name: nested for name, nested in classes.items() if nested is not None}


@remembered
def named_tables_of(cls: type[Any]) -> Mapping[str, ClassOf]:
    """The fields that hold tables of the classes that other fields name (`ClassOf`)."""
    named = {name: class_of(attribute.type) for name, attribute in fields_of(cls).items()}
    return {name: naming for name, naming in named.items() if naming is not None}


def fit_field(attribute: attrs.Attribute[Any], value: object) -> Any:
    """`value` as the field stores it: through its own converter, if it has one, then frozen. Raises `TypeMismatch`."""
    converter = attribute.metadata.get("converter")
    return coerce_exact(converter(value) if converter else value, attribute.type)


def validated(attribute: attrs.Attribute[Any], value: object, owner: object) -> Any:
    """`value` as the field stores it, after validation. Raises ValueError (`TypeMismatch`, `ConfigError`)."""
    value = fit_field(attribute, value)
    if attribute.validator is not None:
        try:
            attribute.validator(owner, attribute, value)
        except TypeError as error:  # raised by attrs' own validators for a wrong type
            raise TypeMismatch(str(error.args[0]) if error.args else "TypeError") from None
    return value


def written_fields(config: object) -> frozenset[str] | None:
    """Names of the fields of a table that somebody wrote, the default included; None for a table made in Python.

    `load` leaves them on each table of its tree, where they are no part of its value: `==`, `hash`, `repr`,
    fingerprints and dictionaries know nothing of them. Copies, pickles and `evolve_at` keep them; `attrs.evolve` makes
    a new table without them.
    """
    names: frozenset[str] | None = getattr(config, _WRITTEN, None)
    return names


def mark_written(config: C, names: Iterable[str]) -> C:
    """A copy of the table that says that these fields, too, were written; a table of a foreign class is returned."""
    if not is_config(type(config)):
        return config
    return assembled(config, {_WRITTEN: (written_fields(config) or frozenset()).union(names)})


def unmark_written(config: C, name: str) -> C:
    """A copy of the table that no longer says that this field was written."""
    return assembled(config, {_WRITTEN: (written_fields(config) or frozenset()) - {name}})


_WRITTEN = "__written__"


def resume_role(attribute: attrs.Attribute[Any]) -> ResumeRole:
    """Role of the field on resume: a change makes another run, changes its numbers, or changes neither."""
    role: ResumeRole = attribute.metadata.get("role", "numerics")
    return role


def leaf_paths(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, attrs.Attribute[Any]]]:
    """Every dotted path that holds a value, with its field; optional sub-tables are entered too."""
    tables = tables_of(cls)
    for name, attribute in fields_of(cls).items():
        if name in tables:
            yield from leaf_paths(tables[name], f"{prefix}{name}.")
        else:
            yield prefix + name, attribute


def table_paths(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """Every dotted path that holds a nested table."""
    for name, nested in tables_of(cls).items():
        yield prefix + name
        yield from table_paths(nested, f"{prefix}{name}.")


def docs_of(cls: type[Any]) -> dict[str, str]:
    """Field name -> the string literal below the field, in one line; parent classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_config(base):
            docs |= _class_docs(base)
    return docs


@remembered
def _class_docs(cls: type[Any]) -> dict[str, str]:
    import textwrap

    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # a class defined in an interactive session has no source
        return {}
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)).body
    return {
        above.target.id: " ".join(below.value.value.split())
        for above, below in pairwise(body)
        if isinstance(above, ast.AnnAssign)
        and isinstance(above.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


_BY_NAME: dict[str, type[Any]] = {}
_FACTORY: Any = attrs.Factory


def _checked_fields(cls: type[Any], attributes: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """The fields as attrs sees them: their converters are moved to the metadata, where `fit_field` finds them, and a
    table without a default gets that of its class.
    """
    checked = []
    for attribute in attributes:
        if attribute.default is attrs.NOTHING:
            kind: Any = _types_of(cls)[attribute.name] if isinstance(attribute.type, str) else attribute.type
            if not is_config(kind):
                written = attribute.type if isinstance(attribute.type, str) else getattr(kind, "__name__", "<type>")
                hint = f"write {attribute.name}: {written} = <default>, such as an instance of its class"
                raise TypeError(f"{cls.__name__}.{attribute.name} needs a default: {hint}")
            attribute = attribute.evolve(default=attrs.Factory(kind))
        given: Any = attribute
        unsupported = {  # by the methods below
            "alias": given.alias not in (None, given.name, given.name.lstrip("_")),
            "eq": given.eq_key is not None,
            "order": given.order_key is not None or given.order != given.eq,
            "hash": given.hash not in (None, given.eq),
            "on_setattr": given.on_setattr is not None,
            "repr": not isinstance(given.repr, bool),
        }
        if left_out := next((name for name, is_set in unsupported.items() if is_set), ""):
            raise TypeError(f"{cls.__name__}.{attribute.name}: field({left_out}=...) has no effect here; leave it out")
        if isinstance(attribute.default, _FACTORY) and attribute.default.takes_self:
            raise TypeError(f"{cls.__name__}.{attribute.name}: a default cannot depend on other fields; use a rule")
        if given.inherited and attribute.name in vars(cls):
            raise TypeError(f"{cls.__name__}.{attribute.name} needs a type: write {attribute.name}: <type> = <default>")
        if attribute.converter:
            metadata = {**attribute.metadata, "converter": attribute.converter}
            attribute = attribute.evolve(converter=None, metadata=metadata)
        checked.append(attribute)
    return checked


def _init(self: Any, /, **kwargs: object) -> None:
    """Constructor: sets each field to its default or to the given value, converted and validated."""
    cls = type(self)
    fields, values = fields_of(cls), dict(_defaults_of(cls))
    changed, problems = [], []
    for name, value in kwargs.items():
        if name not in fields or not fields[name].init:
            problems.append(unknown_field(name, fields))
            continue
        if value is values[name]:
            continue
        try:
            values[name] = fit_field(fields[name], value)
            changed.append(name)
        except TypeMismatch as misfit:
            problems.append(Problem(path=name, message=str(misfit), hint=misfit.hint))
    vars(self).update(values)
    problems += _refused(self, changed)
    if not problems and kwargs and (local := getattr(cls, "own_problems", None)):
        problems += [problem for problem in local(self) if problem.severity == "error"]
    if problems:
        is_unknown = any(name not in fields for name in kwargs)
        kind = UnknownFieldError if is_unknown else ConfigError
        raise kind(problems, title=f"{cls.__name__} cannot be built")
    if hasattr(cls, "__attrs_post_init__"):
        self.__attrs_post_init__()


def unknown_field(name: str, fields: Mapping[str, Any]) -> Problem:
    """The problem of a name that is not among `fields`, with the most similar name as a suggestion."""
    meant = nearest(name, tuple(fields))
    hint = f"did you mean {meant}?" if meant else f"fields: {', '.join(fields) or 'none'}"
    return Problem(path=name, message="no such field", hint=hint, code="misspelled field" if meant else "unknown field")


def assembled(config: C, changes: Mapping[str, Any]) -> C:
    """A copy of `config` with values that are already validated; nothing is validated again."""
    twin: C = object.__new__(type(config))
    vars(twin).update(vars(config))
    vars(twin).update(changes)
    return twin


def _refused(config: object, names: Iterable[str]) -> list[Problem]:
    """Problems that the validators of these fields find in their values."""
    fields = fields_of(type(config))
    problems: list[Problem] = []
    for name in names:
        try:
            if (validator := fields[name].validator) is not None:
                validator(config, fields[name], getattr(config, name))
        except ConfigError as error:
            problems += error.problems
    return problems


@remembered
def _defaults_of(cls: type[Any]) -> Mapping[str, Any]:
    """The defaults as the fields store them, computed once per class, since they are immutable."""
    values, problems = {}, []
    for name, attribute in fields_of(cls).items():
        default: Any = attribute.default
        try:
            values[name] = fit_field(attribute, default.factory() if isinstance(default, _FACTORY) else default)
        except TypeMismatch as misfit:
            problems.append(Problem(path=name, message=str(misfit), hint=misfit.hint))
    blank = object.__new__(cls)
    vars(blank).update(values)
    problems += _refused(blank, values)
    if problems:
        raise ConfigError(problems, title=f"{cls.__name__} cannot be built")
    return values


def _values(config: Any) -> tuple[Any, ...]:
    return tuple(getattr(config, attribute.name) for attribute in attrs.fields(type(config)) if attribute.eq)


def _equal(self: object, other: object) -> bool:
    return _values(self) == _values(other) if type(self) is type(other) else NotImplemented


def _hash(self: object) -> int:
    return hash((type(self), _values(self)))


def _repr(self: Any) -> str:
    fields = (
        f"{attribute.name}={getattr(self, attribute.name)!r}"
        for attribute in attrs.fields(type(self))
        if attribute.repr
    )
    return f"{type(self).__qualname__}({', '.join(fields)})"


class _Signature:
    """The constructor's signature, which notebooks show; computed on first access."""

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        defaults, keyword_only = _defaults_of(owner), inspect.Parameter.KEYWORD_ONLY
        attributes = [attribute for attribute in fields_of(owner).values() if attribute.init]
        return inspect.Signature(
            [
                inspect.Parameter(item.name, keyword_only, default=defaults[item.name], annotation=item.type)
                for item in attributes
            ]
        )


_SHARED_METHODS = {
    "__init__": _init,
    "__signature__": _Signature(),
    "__eq__": _equal,
    "__hash__": _hash,
    "__repr__": _repr,
}
"""Methods that attrs would otherwise compile for each class, which takes 8 ms of every cold start; attrs' constructor
would also not check types.
"""


def _types_of(cls: type[Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"a field of {cls.__qualname__} is annotated with {error.name}, which does not exist in its module at run "
            "time: define or import it at the top of the module, outside of TYPE_CHECKING"
        ) from None
