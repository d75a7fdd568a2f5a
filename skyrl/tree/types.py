"""The types of fields, with plain data, units and secrets, and whether a value fits one: exactly, never by casting.

`coerce_exact` takes values from typed sources (TOML, JSON, Python), `parse` takes text from a command line, where the
field's type decides what it means: `run_name=1e5` is text, `lr=1e5` a number. Both return frozen values or raise
`TypeMismatch`. A single text for a list of text is a list of one. Types that are not listed here go to cattrs' global
converter, so that a hook registered there works in a config class.
"""

from __future__ import annotations

import ast
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from functools import cache, wraps
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin

import attrs
import cattrs
from attrs import frozen

from skyrl.errors import ConfigError, Problem, ProblemCode
from skyrl.tree.frozen import FrozenDict
from skyrl.tree.masking import REFERENCE, SHOWN, masked
from skyrl.tree.names import nearest
from skyrl.tree.origins import dotted

DEEPEST = 50
"""Deepest nesting of lists and tables in a free-form value."""

MOST_VALUES = 50_000
"""Largest number of values in one file, and assigned to one tree in total."""

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
"""Names of these types in messages."""


class TypeMismatch(ValueError):
    """A value that its type does not allow. The message is a sentence about the value: `'fast' is not a number`."""

    def __init__(self, message: str, hint: str = "", code: ProblemCode = "", value: object = None) -> None:
        super().__init__(message)
        self.hint, self.code, self.value = hint, code, value


def plain(value: object, depth: int = 0) -> Any:
    """`value`, frozen, if it is plain data. Raises `TypeMismatch`."""
    if value is None or type(value) is bool:
        return value
    if type(value) is float:
        return number(value)
    if type(value) in (int, str):
        return scalar(value, type(value))
    if depth == DEEPEST:
        raise TypeMismatch(f"lists and tables are nested more than {DEEPEST} levels deep")
    if isinstance(value, list | tuple):
        return tuple(plain(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        return FrozenDict({key_of_table(key): plain(item, depth + 1) for key, item in value.items()})
    raise TypeMismatch(
        f"{display_value(value)} is not plain data: null, true or false, a number, text, a list or a table"
    )


def count_values(value: object, most: int) -> int:
    """Number of values in lists and tables at any depth, including the outermost; counting stops beyond `most`."""
    count, waiting = 1, [value]
    while waiting and count <= most:
        inner = waiting.pop()
        if isinstance(inner, list | tuple | Mapping):
            count += len(inner)
            waiting += inner.values() if isinstance(inner, Mapping) else inner
    return count


def scalar(value: object, kind: type) -> Any:
    """`value` if it is exactly a bool, an int (of at most 64 bits) or a str (that UTF-8 can hold). Raises
    `TypeMismatch`.
    """
    if type(value) is not kind:
        raise TypeMismatch(f"{display_value(value)} is not {NAMES[kind]}", hint=_spelling_hint(value, kind))
    if kind is int and isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TypeMismatch(f"{display_value(value)} does not fit into 64 bits")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeMismatch(f"{display_value(value)} is not Unicode text") from None
    return value


def number(value: Any) -> float:
    """`value` as a finite float, if it is an int or a float. Raises `TypeMismatch`."""
    if type(value) not in (int, float):
        raise TypeMismatch(f"{display_value(value)} is not {NAMES[float]}", hint=_spelling_hint(value, float))
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise TypeMismatch(f"{display_value(value)} is not a finite number")
    return converted + 0.0  # never -0.0, which equals 0.0 and would have another fingerprint


def key_of_table(key: object) -> str:
    """`key` if it is text. Raises `TypeMismatch`."""
    if type(key) is not str:
        raise TypeMismatch(f"key {display_value(key)} is not text")
    scalar(key, str)
    return key


def display_value(value: object) -> str:
    """A value for messages: as TOML spells it and with null, without secrets, shortened if long."""
    try:
        text = _spelled(masked(value))
    except (ValueError, RecursionError):  # an integer with thousands of digits, or lists nested too deeply
        text = f"this {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"


def _spelled(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case date() | time():
            return value.isoformat()
        case list() | tuple():
            return f"[{', '.join(map(_spelled, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{dotted((str(key),))} = {_spelled(item)}' for key, item in value.items())}}}"
    return repr(value)


def _spelling_hint(value: Any, kind: type) -> str:
    if kind is str:
        return "put it in quotes" if type(value) in (bool, int, float) else ""
    if type(value) is not str:
        return ""
    try:
        meant = value.lower() in ("true", "false") if kind is bool else math.isfinite(kind(value))
    except (ValueError, OverflowError):
        return ""
    return "remove the quotes" if meant else ""


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
        match = isinstance(value, str) and (REFERENCE.fullmatch(value) or SHOWN.fullmatch(value))
        if not match:
            raise TypeMismatch(
                "a secret cannot be written in the configuration itself",
                hint='write "env:NAME" to read it from a variable',
            )
        return cls(match[1])

    def reveal(self, environ: Mapping[str, str]) -> str:
        """Value of the variable. Raises `ConfigError` if it is not set."""
        if not environ.get(self.name):
            message = "this environment variable, which must hold a secret, is not set or is empty"
            raise ConfigError([Problem(path=self.name, message=message)])
        return environ[self.name]

    def __repr__(self) -> str:
        return f"*** (env:{self.name})"

    __str__ = __repr__


N = TypeVar("N", int, float)

_TEXT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]+)")


@frozen(kw_only=True)
class Unit:
    """Unit of a field, and the units in which it may be written: name -> factor to the field's unit."""

    name: str
    example: str
    factors: Mapping[str, float]
    most: float = 1e9
    """Largest value of a field: 31 years, and an exabyte. Beyond it, clocks and counts of bytes overflow."""

    @property
    def pattern(self) -> str:
        """Regular expression, in JSON Schema syntax, for the text that `read` accepts."""
        return rf"^\s*{_TEXT.pattern.replace('[A-Za-z]+', '|'.join(self.factors))}\s*$"

    def read(self, text: str) -> float | None:
        """The value of `text` in this unit; None if the text has no unit. Raises `TypeMismatch` for an unknown unit."""
        match = _TEXT.fullmatch(text.strip())
        if not match:
            return None
        if match[2] not in self.factors:
            known = ", ".join(self.factors)
            raise TypeMismatch(
                f"{display_value(text)} is not a number of {self.name}",
                hint=f"units: {known}; for example {self.example}",
            )
        return round(float(match[1]) * self.factors[match[2]], 12)

    def bounded(self, number: N) -> N:
        """The number, if it is not implausibly large. Raises `TypeMismatch`."""
        if number > self.most:
            raise TypeMismatch(f"{display_value(number)} is more than {self.most:.0f} {self.name}, the limit")
        return number


SECONDS = Unit(
    name="seconds",
    example='"90s" or "10m"',
    factors=FrozenDict({"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}),
)
GIGABYTES = Unit(
    name="gigabytes",
    example='"512MB" or "2GiB"',
    factors=FrozenDict(
        {
            "B": 1e-9, "KB": 1e-6, "MB": 1e-3, "GB": 1.0, "TB": 1e3,
            "KiB": 2**10 / 1e9, "MiB": 2**20 / 1e9, "GiB": 2**30 / 1e9, "TiB": 2**40 / 1e9,
        }
    ),
)  # fmt: skip

Seconds = Annotated[float, SECONDS]
WholeSeconds = Annotated[int, SECONDS]
Gigabytes = Annotated[float, GIGABYTES]


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
K = TypeVar("K")

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
        fitted, unit = coerce_exact(_strip_unit(value, kind), bare(kind)), unit_of(kind)
        return unit.bounded(fitted) if unit else fitted
    if kind is type(None):
        if value is None:
            return None
        raise TypeMismatch(f"{display_value(value)} is not null")
    if get_origin(kind) is Literal:
        return _member(value, kind)
    if is_union(kind):
        return _fit_union(value, kind)
    if is_list(kind):
        is_single = takes_one_text(kind) and type(value) is str and value not in ("", *NULL_WORDS)
        return _fit_list((value,) if is_single else value, kind)
    if is_mapping(kind):
        return _fit_mapping(value, kind)
    if attrs.has(kind):
        return _instance(value, kind)
    if kind is Secret:
        return Secret.read(value)
    return _structure_value(value, kind)


def fit(value: Any, kind: object, *, is_text: bool) -> Any:
    """`value` as a member of `kind`, whichever source it is from. Raises `TypeMismatch`."""
    return parse(value, kind) if is_text else coerce_exact(value, kind)


def parse(text: str, kind: Any) -> Any:
    """The member of `kind` that `text` spells on a command line. Raises `TypeMismatch`."""
    if (number := _strip_unit(text, kind)) is not text:
        return coerce_exact(number, kind)
    if unit := unit_of(kind):
        return unit.bounded(parse(text, bare(kind)))
    kind = bare(kind)
    if kind is str:
        return scalar(text, str)
    if kind is Any or kind is object:
        return literal(text)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise TypeMismatch(f"{display_value(text)} is not {describe(bool)}")
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
        raise TypeMismatch(f"{display_value(text)} is not {describe(kind)}", hint=quoting_hint(is_list(kind)))
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
        plurals = {"a number": "numbers", "a whole number": "whole numbers", "any value": "any values"}
        items = [describe(item) for item in get_args(kind) if item is not ...] or ["any value"]
        return "a list of " + ", ".join(plurals.get(item, item) for item in items)
    if is_mapping(kind):
        return "a table"
    if attrs.has(kind):
        return f"a table ({kind.__name__})"
    return f"a {getattr(kind, '__name__', kind)}"


def remembered(function: Callable[[K], A]) -> Callable[[K], A]:
    """The function with its answers kept: the same few types are asked about for every value of every file, and
    `typing` takes its time. A type that cannot be hashed, such as `Annotated[int, []]`, is asked about each time.
    """
    known: Callable[[Any], A] = cache(function)

    @wraps(function)
    def answer(kind: K) -> A:
        try:
            return known(kind)
        except TypeError:
            try:
                hash(kind)
            except TypeError:
                return function(kind)
            raise  # the function's own error, such as that of a field's default

    return answer


@remembered
def bare(kind: object) -> Any:
    """The underlying type, without the wrappers `Annotated` and `NewType`."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif isinstance(kind, NewType):
            kind = kind.__supertype__
        else:
            return kind


@remembered
def unit_of(kind: object) -> Unit | None:
    """Unit of numbers of this type, if it has one."""
    return next((item for item in getattr(kind, "__metadata__", ()) if isinstance(item, Unit)), None)


@remembered
def class_of(kind: object) -> ClassOf | None:
    """Marker of a table whose class a sibling field names, if the type has one."""
    return next((item for item in getattr(kind, "__metadata__", ()) if isinstance(item, ClassOf)), None)


@remembered
def is_union(kind: object) -> bool:
    """Whether the type is `A | B`, `Optional[A]` or `Union[A, B]`."""
    return get_origin(kind) in (Union, types.UnionType)


def choices_of(kind: object) -> list[str]:
    """The words for a field of this type if they are few: those of a Literal or a bool, also as items; else empty."""
    kind = bare(kind)
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [arg for arg in get_args(kind) if isinstance(arg, str)]
    if is_union(kind):
        return list(dict.fromkeys(choice for arm in get_args(kind) for choice in choices_of(arm)))
    return choices_of(item_kind(kind)) if is_list(kind) else []


def is_optional(kind: object) -> bool:
    """May the value be None?"""
    return is_union(kind) and type(None) in get_args(kind)


@remembered
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


@remembered
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
    arms = map(bare, get_args(kind) if is_union(kind) else (kind,))
    return next((arm for arm in arms if isinstance(arm, type) and attrs.has(arm)), None)


def _member(value: object, kind: object) -> object:
    for member in get_args(kind):
        if type(member) is type(value) and member == value:
            return member
    meant = nearest(value, [str(member) for member in get_args(kind)]) if isinstance(value, str) else None
    hint = f"did you mean {meant}?" if meant else ""
    raise TypeMismatch(f"{display_value(value)} is not {describe(kind)}", hint, code="not a choice", value=value)


def _instance(value: object, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise TypeMismatch(f"{display_value(value)} is not {describe(kind)}")
    if "__attrs_attrs__" not in vars(type(value)):
        raise TypeMismatch(f"{type(value).__name__} lacks the decorator @frozen: its own fields would be ignored")
    return value


def _fit_union(value: object, kind: object) -> object:
    if is_optional(kind) and (value is None or (type(value) is str and value == "none" and not lists_none(kind))):
        return None
    return _first_fitting(value, kind, _arms(kind), coerce_exact, _fit_list)


def _parse_union(text: str, kind: object) -> object:
    if is_optional(kind) and text in NULL_WORDS and not (text == "none" and lists_none(kind)):
        return None
    arms = sorted(_arms(kind), key=lambda arm: arm is str)  # text takes everything, so it is tried last
    if is_bracketed(text) and any(map(is_list, arms)):
        arms = [arm for arm in arms if arm is not str]  # a list whose quotes the shell removed is a mistake, not text
    return _first_fitting(text, kind, arms, parse, _parse_bracketed)


_Read = Callable[[Any, Any], Any]
"""Function of a value and a type that returns a member of the type, or raises `TypeMismatch`."""


def _first_fitting(value: object, kind: object, arms: Sequence[Any], read: _Read, read_list: _Read) -> Any:
    """The value as a member of the first arm that it fits. Beside other types, a text is no list: `read_list` takes
    none.
    """
    refused: list[TypeMismatch] = []
    for arm in arms:
        try:
            return read(value, arm) if len(arms) == 1 or not is_list(arm) else read_list(value, arm)
        except TypeMismatch as misfit:
            refused.append(misfit)
    if len(refused) == 1 or holds_secret(kind):  # the error of a secret does not repeat the value
        raise refused[0]
    hint = next((misfit.hint for misfit in refused if misfit.hint), "")
    raise TypeMismatch(f"{display_value(value)} is not {describe(kind)}", hint=hint)


def _arms(kind: object) -> list[Any]:
    return [arm if unit_of(arm) else bare(arm) for arm in get_args(kind) if arm is not type(None)]


def _strip_unit(value: Any, kind: object) -> Any:
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
        hint = f"write [{display_value(value)}]" if type(value) in (str, int, float) else ""
        raise TypeMismatch(f"{display_value(value)} is not {describe(kind)}", hint=hint)
    kinds = get_args(kind) or (Any, ...)
    if get_origin(kind) is not tuple or kinds[-1] is ...:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise TypeMismatch(f"{display_value(value)} is not {describe(kind)}")
    fitted = []
    for index, (item, item_kind) in enumerate(zip(value, kinds, strict=True)):
        try:
            is_table = isinstance(item, Mapping) and attrs.has(item_kind)
            fitted.append(_structure_value(item, item_kind) if is_table else coerce_exact(item, item_kind))
        except TypeMismatch as misfit:
            message = f"item {index}: {misfit}"
            raise TypeMismatch(message, hint=misfit.hint, code=misfit.code, value=misfit.value) from None
    return tuple(fitted)


def _fit_mapping(value: object, kind: object) -> FrozenDict:
    if not isinstance(value, Mapping):
        raise TypeMismatch(f"{display_value(value)} is not a table")
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
        raise TypeMismatch(f"{display_value(text)} is not {describe(kind)}") from None
    fitted: int | float = coerce_exact(value, kind)
    return fitted


def _structure_value(value: object, kind: Any) -> Any:
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    try:
        return cattrs.structure(value, kind)
    except ConfigError as error:
        first = error.problems[0]
        raise TypeMismatch(f"{first.path}: {first.message}", hint=first.hint) from None
    except Exception as error:  # noqa: BLE001  # a third-party hook may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise TypeMismatch(f"{display_value(value)} is not {describe(kind)} ({reason})") from None


NULL_WORDS = ("null", "none", "None")
"""Command-line words that mean null where null is allowed."""


def literal(text: str) -> Any:
    """Null, true or false, a number, a list or a table, as spelled in JSON, TOML or Python; anything else is text.

    Raises `TypeMismatch` for bracketed text that none of them can parse: the shell has probably removed the quotes.
    """
    if text in NULL_WORDS:
        return None
    if text in ("True", "False"):
        return text == "True"
    for read in (_json, _toml, _python):
        try:
            return plain(read(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    if is_bracketed(text):
        raise TypeMismatch(f"{display_value(text)} is not a list or a table", hint=quoting_hint(text.startswith("[")))
    return scalar(text, str)


def is_bracketed(text: str) -> bool:
    """Does it look like a list or a table?"""
    return text[:1] + text[-1:] in ("[]", "{}")


def quoting_hint(is_list: bool) -> str:
    """How to write a list or a table on a command line."""
    return "quote it for the shell: " + ('\'["a", "b"]\'' if is_list else "'{\"key\": 1}'")


def _json(text: str) -> object:
    import json

    return json.loads(text)


def _toml(text: str) -> object:
    import tomllib

    if text[:1] not in ("[", "{", '"', "'"):  # JSON reads numbers too, and a date stays text
        raise ValueError(text)
    [value] = tomllib.loads(f"value = {text}").values()
    return value


def _python(text: str) -> object:
    import warnings

    with warnings.catch_warnings(action="error"):  # an invalid escape, of which Python only warns, is a mistake
        value = ast.literal_eval(text)
    if text[:1] not in ("[", "{", "(", '"', "'") and (type(value) not in (int, float) or "#" in text):
        raise ValueError(text)
    return value
