"""Reads the JSON body of a request field by field, and refuses fields that would have no effect."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from skyrl.errors import RequestError

D = TypeVar("D")

_ABSENT = object()


class Fields:
    """The fields of one request. A field that is null counts as absent; `finish` refuses those that were not read."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}
        self._null = body.keys() - self._body.keys()
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def refuse_null(self, *names: str) -> None:
        """Raises `RequestError` if one of these fields is null: JSON of clients has it in place of NaN and infinity."""
        for name in names:
            if name in self._null:
                raise RequestError(f"{name} is null, as NaN and infinity are sent: give a number", param=name)

    def value(self, name: str, default: Any = None) -> Any:
        """The value of any type."""
        self._read.add(name)
        return self._body.get(name, default)

    def text(self, name: str, default: str | None = None) -> str | None:
        """The value, which must be a string."""
        text: str | None = self._typed(name, default, str, "a string")
        return text

    def required_text(self, name: str) -> str:
        """The value, which must be there, and a string."""
        return _present(self.text(name), name)

    def required_integer(self, name: str, *, least: int, most: int) -> int:
        """The value, which must be there, and a whole number from `least` to `most`."""
        return _present(self.integer(name, None, least=least, most=most), name)

    def boolean(self, name: str, default: bool = False) -> bool:
        """The value, which must be true or false."""
        value: bool = self._typed(name, default, bool, "true or false")
        return value

    def integer(self, name: str, default: D, *, least: int, most: int) -> int | D:
        """The value, which must be a whole number from `least` to `most`."""
        value = self.value(name, _ABSENT)
        if value is _ABSENT:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise RequestError(
                f"{name} has to be a whole number from {least} to {most}, not {_short(value)}", param=name
            )
        return value

    def number(self, name: str, default: D, *, least: float, most: float) -> float | D:
        """The value, which must be a finite number from `least` to `most`."""
        value = self.value(name, _ABSENT)
        if value is _ABSENT:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not least <= value <= most:
            raise RequestError(f"{name} has to be a number from {least:g} to {most:g}, not {_short(value)}", param=name)
        return float(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """The value, which must be a string or a list of strings, none of them empty."""
        value = self.value(name, ())
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        if not isinstance(texts, tuple) or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"{name} has to be a string or a list of strings that are not empty", param=name)
        return texts

    def ids(self, name: str) -> tuple[int, ...]:
        """The value, which must be a list of token ids."""
        value = self.value(name, [])
        if not isinstance(value, list) or not all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value
        ):
            raise RequestError(f"{name} has to be a list of token ids", param=name)
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """The value, which must be an object."""
        value: Mapping[str, Any] = self._typed(name, {}, dict, "an object")
        return value

    def objects(self, name: str) -> list[Mapping[str, Any]]:
        """The value, which must be a list of objects."""
        items: list[Mapping[str, Any]] = self._typed(name, [], list, "a list of objects")
        if not all(isinstance(item, dict) for item in items):
            raise RequestError(f"{name} has to be a list of objects", param=name)
        return items

    def refuse(self, name: str, reason: str, *, harmless: Collection[object] = ()) -> None:
        """Refuse a field that would change the answer and is not implemented, unless its value is `harmless`."""
        value = self.value(name, _ABSENT)
        if value is not _ABSENT and not any(value == item and type(value) is type(item) for item in harmless):
            raise RequestError(
                f"{name} = {_short(value)} is not supported: {reason}", param=name, code="unsupported_value"
            )

    def ignore(self, *names: str) -> None:
        """Accept fields that do not change the answer, such as bookkeeping names."""
        self._read.update(names)

    def finish(self) -> None:
        """Raises `RequestError` if a field was not read."""
        for name in self._body:
            if name not in self._read:
                near = difflib.get_close_matches(name, self._read, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise RequestError(f"{_short(name)} is not a field of this request{hint}", param=name[:80])

    def _typed(self, name: str, default: Any, kind: type[Any], description: str) -> Any:
        value = self.value(name, default)
        if value is not default and not isinstance(value, kind):
            raise RequestError(f"{name} has to be {description}, not {_short(value)}", param=name)
        return value


def _present(value: D | None, name: str) -> D:
    if value is None:
        raise RequestError(f"{name} is missing", param=name)
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
