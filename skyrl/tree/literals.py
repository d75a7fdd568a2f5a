"""Interprets text whose field does not determine the type: an entry of a free-form table, a list or a union."""

from __future__ import annotations

import ast
from typing import Any

from skyrl.tree.plain import TypeMismatch, plain, scalar, shown

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
        raise TypeMismatch(f"{shown(text)} is not a list or a table", hint=quoting_hint(text.startswith("[")))
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
