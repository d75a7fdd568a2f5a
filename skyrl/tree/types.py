"""Checks whether a value fits a type: exactly, never by casting.

`coerce_exact` takes values from typed sources (TOML, JSON, Python), `parse` takes text from a command line, where the
field's type decides what it means: `run_name=1e5` is text, `lr=1e5` a number. Both return frozen values or raise
`TypeMismatch`. A single text for a list of text is a list of one. Types that are not listed here go to cattrs' global
converter, so that a hook registered there works in a config class.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin

import attrs
import cattrs

from skyrl.errors import ConfigError
from skyrl.tree.frozen import FrozenDict
from skyrl.tree.literals import NULL_WORDS, is_bracketed, literal, quoting_hint
from skyrl.tree.names import nearest
from skyrl.tree.plain import NAMES, TypeMismatch, key_of_table, number, plain, scalar, shown
from skyrl.tree.secrets import Secret
from skyrl.tree.units import Unit


@attrs.frozen
class ClassOf:
    """Annotation of a free-form table: a sibling field names the class whose fields are the table's keys.

        policy_loss: Annotated[Mapping[str, Any], ClassOf("policy_loss_type", find)] = FrozenDict()

    If the class is known, the table holds an instance of it; otherwise it holds what was written.
    """

    field: str
    """Name of the sibling field."""

    find: Callable[[Any, bool], type[Any] | None]
    """Function of the field's value, and whether it may be imported, that returns the configuration class or None."""


A = TypeVar("A")

_LISTS = (tuple, list, Sequence)
_MAPPINGS = (Mapping, dict, FrozenDict)


def coerce_exact(value: object, kind: Any) -> Any:
    """`value` as a frozen member of the type `kind`; integers are accepted as floats, nothing else is cast.

    Raises `TypeMismatch`.
    """
    if kind is Any or kind is object:
        return plain(value)
    if kind is float:
        return number(value)
    if kind in (bool, int, str):
        return scalar(value, kind)
    if class_of(kind) and hasattr(type(value), "__configuration__"):
        return value
    if get_origin(kind) is Annotated or isinstance(kind, NewType):
        fitted, unit = coerce_exact(_without_unit(value, kind), bare(kind)), unit_of(kind)
        return unit.within(fitted) if unit else fitted
    if kind is type(None):
        if value is None:
            return None
        raise TypeMismatch(f"{shown(value)} is not null")
    if get_origin(kind) is Literal:
        return _member(value, kind)
    if is_union(kind):
        return _fit_union(value, kind)
    if is_list(kind):
        one = takes_one_text(kind) and type(value) is str and value not in ("", *NULL_WORDS)
        return _fit_list((value,) if one else value, kind)
    if is_mapping(kind):
        return _fit_mapping(value, kind)
    if attrs.has(kind):
        return _instance(value, kind)
    if kind is Secret:
        return Secret.read(value)
    return _by_cattrs(value, kind)


def parse(text: str, kind: Any) -> Any:
    """The member of `kind` that `text` spells on a command line. Raises `TypeMismatch`."""
    if (number := _without_unit(text, kind)) is not text:
        return coerce_exact(number, kind)
    if unit := unit_of(kind):
        return unit.within(parse(text, bare(kind)))
    kind = bare(kind)
    if kind is str:
        return scalar(text, str)
    if kind is Any or kind is object:
        return literal(text)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise TypeMismatch(f"{shown(text)} is not {describe(bool)}")
    if kind in (int, float):
        return _parse_number(text, kind)
    if is_union(kind):
        return _parse_union(text, kind)
    if get_origin(kind) is Literal:
        spelled = {str(member): member for member in get_args(kind)}
        return _member(spelled.get(text, text), kind)
    if takes_one_text(kind) and _is_one_text(text):
        return (parse(text, item_kind(kind)),)
    if is_list(kind) or is_mapping(kind) or attrs.has(kind):
        return _parse_bracketed(text, kind)
    return coerce_exact(text, kind)


def _parse_bracketed(text: str, kind: object) -> object:
    value: object = literal(text)
    if value is None or isinstance(value, str):
        raise TypeMismatch(f"{shown(text)} is not {describe(kind)}", hint=quoting_hint(is_list(kind)))
    return value if isinstance(kind, type) and attrs.has(kind) else coerce_exact(value, kind)


def describe(kind: Any) -> str:
    """A type in words: `a list of text`, `true or false`, `one of: none, latest`."""
    if unit := unit_of(kind):
        return f"{NAMES[bare(kind)]} of {unit.name}"
    kind = bare(kind)
    if kind is Any or kind is object:
        return "any value"
    if kind is Secret:
        return 'a secret ("env:NAME")'
    if kind in NAMES:
        return NAMES[kind]
    if get_origin(kind) is Literal:
        return "one of: " + ", ".join(str(member) for member in get_args(kind))
    if is_union(kind):
        return " or ".join(describe(arm) for arm in get_args(kind))
    if is_list(kind):
        items = [item for item in get_args(kind) if item is not ...] or [Any]
        return "a list of " + ", ".join(_plural(describe(item)) for item in items)
    if is_mapping(kind):
        return "a table"
    if attrs.has(kind):
        return f"a table ({kind.__name__})"
    return f"a {getattr(kind, '__name__', kind)}"


def _remembered(ask: Callable[[object], A]) -> Callable[[object], A]:
    """The function with its answers kept: the same few types are asked about for every value of every file, and
    `typing` takes its time. A type that cannot be hashed, such as `Annotated[int, []]`, is asked about each time.
    """
    known = cache(ask)

    @wraps(ask)
    def answer(kind: object) -> A:
        try:
            return known(kind)
        except TypeError:
            return ask(kind)

    return answer


@_remembered
def bare(kind: object) -> Any:
    """The underlying type, without the wrappers `Annotated` and `NewType`."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif isinstance(kind, NewType):
            kind = kind.__supertype__
        else:
            return kind


@_remembered
def unit_of(kind: object) -> Unit | None:
    """Unit of numbers of this type, if it has one."""
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Unit)), None)


@_remembered
def class_of(kind: object) -> ClassOf | None:
    """Marker of a table whose class a sibling field names, if the type has one."""
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, ClassOf)), None)


@_remembered
def is_union(kind: object) -> bool:
    """Whether the type is `A | B`, `Optional[A]` or `Union[A, B]`."""
    return get_origin(kind) in (Union, types.UnionType)


def is_optional(kind: object) -> bool:
    """May the value be None?"""
    return is_union(kind) and type(None) in get_args(kind)


@_remembered
def is_list(kind: object) -> bool:
    """Whether the type is `tuple[A, B]`, or `tuple[T, ...]`, `list[T]` or `Sequence[T]`, which are stored as tuples."""
    return (get_origin(kind) or kind) in _LISTS


def takes_one_text(kind: object) -> bool:
    """Whether the type is a list of text or of certain words, for which a single text is a list of one."""
    item = bare(item_kind(kind)) if is_list(kind) and get_args(kind)[1:] in ((), (...,)) else None
    return item is str or (get_origin(item) is Literal and all(type(member) is str for member in get_args(item)))


def _is_one_text(text: str) -> bool:
    """Whether text of a command line is neither a list, nor one whose brackets or quotes are missing, nor null."""
    return not (
        text in ("", *NULL_WORDS) or "," in text or text.startswith(("[", "{", '"', "'")) or text.endswith(("]", "}"))
    )


def list_arm(kind: object) -> Any:
    """`kind` if it is a list type, or the arm of the union that is one; None if there is none."""
    arms = _arms(kind) if is_union(kind) else [bare(kind)]
    return next((arm for arm in arms if is_list(arm)), None)


def item_kind(kind: object) -> Any:
    """The type of a list's items: T of `tuple[T, ...]`."""
    return (*get_args(kind), Any)[0]


def holds_secret(kind: object) -> bool:
    """Is it a secret, alone or optional?"""
    return Secret in (_arms(kind) if is_union(kind) else [bare(kind)])


@_remembered
def is_mapping(kind: object) -> bool:
    """Whether the type is a free-form table: `Mapping[str, T]`, alone or optional."""
    return _mapping_arm(kind) is not None


def value_kind(kind: object) -> Any:
    """The type of the values of a free-form table: T of `Mapping[str, T]`."""
    return (*get_args(_mapping_arm(kind)), Any, Any)[1]


def config_class(kind: object) -> type[attrs.AttrsInstance] | None:
    """The nested class that `kind` names, alone or as one arm of an optional."""
    if isinstance(kind, type):  # the usual case, checked first: this runs for every name of every path
        return kind if attrs.has(kind) else None
    arms = get_args(kind) if is_union(kind) else (kind,)
    for arm in map(bare, arms):
        if isinstance(arm, type) and attrs.has(arm):
            return arm
    return None


def _member(value: object, kind: object) -> object:
    for member in get_args(kind):
        if type(member) is type(value) and member == value:
            return member
    meant = nearest(value, [str(member) for member in get_args(kind)]) if isinstance(value, str) else None
    hint = f"did you mean {meant}?" if meant else ""
    raise TypeMismatch(f"{shown(value)} is not {describe(kind)}", hint, code="not a choice", value=value)


def _instance(value: object, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise TypeMismatch(f"{shown(value)} is not {describe(kind)}")
    if "__attrs_attrs__" not in vars(type(value)):
        raise TypeMismatch(f"{type(value).__name__} lacks the decorator @frozen: its own fields would be ignored")
    return value


def _fit_union(value: object, kind: object) -> object:
    if is_optional(kind) and (value is None or (type(value) is str and value == "none" and not lists_none(kind))):
        return None
    arms = _arms(kind)
    alone = len(arms) == 1  # beside other types, a text is no list

    def take(arm: object) -> object:
        return coerce_exact(value, arm) if alone or not is_list(arm) else _fit_list(value, arm)

    return _first_that_takes(arms, take, value, kind)


def _parse_union(text: str, kind: object) -> object:
    if is_optional(kind) and text in NULL_WORDS and not (text == "none" and lists_none(kind)):
        return None
    arms = sorted(_arms(kind), key=lambda arm: arm is str)  # text takes everything, so it is tried last
    if is_bracketed(text) and any(map(is_list, arms)):
        arms = [arm for arm in arms if arm is not str]  # a list whose quotes the shell removed is a mistake, not text
    alone = len(arms) == 1

    def take(arm: object) -> object:
        return parse(text, arm) if alone or not is_list(arm) else _parse_bracketed(text, arm)

    return _first_that_takes(arms, take, text, kind)


def _first_that_takes(arms: Iterable[Any], take: Callable[[Any], Any], value: object, kind: object) -> Any:
    refused: list[TypeMismatch] = []
    for arm in arms:
        try:
            return take(arm)
        except TypeMismatch as misfit:
            refused.append(misfit)
    if len(refused) == 1 or holds_secret(kind):  # the error of a secret does not repeat the value
        raise refused[0]
    hint = next((misfit.hint for misfit in refused if misfit.hint), "")
    raise TypeMismatch(f"{shown(value)} is not {describe(kind)}", hint=hint)


def _arms(kind: object) -> list[Any]:
    return [arm if unit_of(arm) else bare(arm) for arm in get_args(kind) if arm is not type(None)]


def _without_unit(value: Any, kind: object) -> Any:
    """The number that text with a unit stands for, if the type has a unit; any other value unchanged."""
    unit = unit_of(kind) if isinstance(value, str) else None
    number = unit.read(value) if unit else None
    if number is None:
        return value
    return int(number) if bare(kind) is int and number.is_integer() else number


def lists_none(kind: object) -> bool:
    """Is `none` a value of the type itself, so that it cannot stand for null?"""
    return any(get_origin(arm) is Literal and "none" in get_args(arm) for arm in get_args(kind))


def _fit_list(value: object, kind: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        hint = f"write [{value!r}]" if type(value) in (str, int, float) else ""
        raise TypeMismatch(f"{shown(value)} is not {describe(kind)}", hint=hint)
    kinds = get_args(kind) or (Any, ...)
    if get_origin(kind) is not tuple or kinds[-1] is ...:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise TypeMismatch(f"{shown(value)} is not {describe(kind)}")
    fitted = []
    for index, (item, item_kind) in enumerate(zip(value, kinds, strict=True)):
        try:
            is_table = isinstance(item, Mapping) and attrs.has(item_kind)
            fitted.append(_by_cattrs(item, item_kind) if is_table else coerce_exact(item, item_kind))
        except TypeMismatch as misfit:
            raise TypeMismatch(f"item {index}: {misfit}", hint=misfit.hint) from None
    return tuple(fitted)


def _fit_mapping(value: object, kind: object) -> FrozenDict:
    if not isinstance(value, Mapping):
        raise TypeMismatch(f"{shown(value)} is not a table")
    fitted = {}
    for key, item in value.items():
        try:
            fitted[key_of_table(key)] = coerce_exact(item, value_kind(kind))
        except TypeMismatch as misfit:
            raise TypeMismatch(f"key {key}: {misfit}", hint=misfit.hint) from None
    return FrozenDict(fitted)


def _mapping_arm(kind: object) -> Any:
    if is_union(kind):
        return next((arm for arm in _arms(kind) if is_mapping(arm)), None)
    kind = bare(kind)
    return kind if (get_origin(kind) or kind) in _MAPPINGS else None


def _parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        if not text.isascii():  # Python also takes the digits of other scripts
            raise ValueError(text)
        value = kind(text)
    except ValueError:
        raise TypeMismatch(f"{shown(text)} is not {describe(kind)}") from None
    fitted: int | float = coerce_exact(value, kind)
    return fitted


def _plural(phrase: str) -> str:
    return {"a number": "numbers", "a whole number": "whole numbers", "any value": "any values"}.get(phrase, phrase)


def _by_cattrs(value: object, kind: Any) -> Any:
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    try:
        return cattrs.structure(value, kind)
    except ConfigError as error:
        first = error.problems[0]
        raise TypeMismatch(f"{first.path}: {first.message}", hint=first.hint) from None
    except Exception as error:  # noqa: BLE001  # a third-party hook may raise anything
        raise TypeMismatch(f"{shown(value)} is not {describe(kind)} ({type(error).__name__}: {error})") from None
