"""Expands the variables in a word of a shell script, as far as the script itself determines their values.

Supported are `$NAME`, `${NAME}`, and the forms with a default, `${NAME:-default}`, `${NAME-default}`,
`${NAME:=default}`, `${NAME=default}`, which may be nested. Forms that only a shell can evaluate (`$(date)`,
`${NAME%.sh}`, `$@`) are left unchanged.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z_]\w*|\d+")
_DEFAULT = re.compile(r":?([-=])")
_DEEPEST = 20
"""Deepest nesting of defaults within defaults that is expanded."""

LONGEST = 100_000
"""Largest number of characters in an expanded value: variables that repeat each other grow without bound."""


def expanded(text: str, variables: dict[str, str], depth: int = 0) -> str:
    """`text` with known variables replaced by their values; `${NAME:=default}` also sets NAME in `variables`."""
    parts: list[str] = []
    size, position = 0, 0
    while position < len(text) and size < LONGEST:
        dollar = text.find("$", position)
        if dollar < 0:
            parts.append(text[position:])
            break
        part, end = _variable(text, dollar, variables, depth)
        parts += [text[position:dollar], part]
        size, position = size + dollar - position + len(part), end
    return "".join(parts)


def unset_variable(text: str) -> str:
    """The name of the first variable, or the first command, that expansion left in a word; empty if none is left."""
    found = re.search(r"\$(?:\{?([A-Za-z_]\w*|\d+|[@*#?!])|(\())", text)
    return "" if not found else f"${found[1]}" if found[1] else "$(...)"


def _variable(text: str, dollar: int, variables: dict[str, str], depth: int) -> tuple[str, int]:
    """Value of the variable that begins at `dollar`, and the position where the text continues."""
    if text.startswith("${", dollar):
        end = _closing(text, dollar + 2)
        if end < 0:
            return text[dollar:], len(text)
        inside = text[dollar + 2 : end]
        return _braced(inside, variables, depth), end + 1
    name = _NAME.match(text, dollar + 1)
    if name is None:
        return "$", dollar + 1
    return variables.get(name[0], f"${name[0]}"), name.end()


def _braced(inside: str, variables: dict[str, str], depth: int) -> str:
    name = _NAME.match(inside)
    unchanged = "${" + inside + "}"
    if name is None or depth >= _DEEPEST:
        return unchanged
    rest = inside[name.end() :]
    if not rest:
        return variables.get(name[0], unchanged)
    default = _DEFAULT.match(rest)
    if default is None:
        return unchanged
    known = variables.get(name[0])
    if known or (known == "" and not rest.startswith(":")):
        return known
    value = expanded(rest[default.end() :], variables, depth + 1)
    if default[1] == "=":
        variables[name[0]] = value
    return value


def _closing(text: str, start: int) -> int:
    """Position of the brace that closes the one before `start`; -1 if there is none."""
    open_braces = 1
    for found in re.finditer(r"[{}]", text[start:]):
        open_braces += 1 if found[0] == "{" else -1
        if not open_braces:
            return start + found.start()
    return -1
