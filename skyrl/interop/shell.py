"""Reads the `path=value` arguments in a shell script without running it.

Variables that the script itself sets are substituted, and so are the defaults of `${NAME:-default}`. Whatever only a
shell can evaluate, such as `$(date)`, stays as it stands; so does a variable that is not set.
"""

from __future__ import annotations

import re
import shlex

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(?:\.[\w\"-]+)*=.*|~[A-Za-z_]\w*(?:\.\w+)+", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)")
_ROOTS = ("data", "trainer", "generator", "environment", "hydra", "deepspeed_config")


def overrides_in(script: str) -> list[str]:
    """Every override, in order, with quotes removed as a shell would."""
    variables = {"HOME": "~"}  # paths of a configuration may begin with it
    found: list[str] = []
    for line in _logical_lines(script):
        words = _words(line)
        if words and all(_ASSIGNMENT.fullmatch(word) and not _is_override(word) for word in words):
            for word in words:
                name, value = _ASSIGNMENT.fullmatch(word).groups()  # type: ignore[union-attr]  # matched above
                variables[name] = _filled(value, variables)
            continue
        found += [_filled(word, variables) for word in words if _is_override(word)]
    return found


def _logical_lines(script: str) -> list[str]:
    joined = re.sub(r"\\\n", " ", script)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def _words(line: str) -> list[str]:
    line = line.removeprefix("export ").strip()
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that another line closes
        return line.split()


def _is_override(word: str) -> bool:
    root = re.match(r"[+~]{0,2}([A-Za-z_]\w*)", word)
    if not root or not _OVERRIDE.fullmatch(word):
        return False
    return "." in word.partition("=")[0] or root[1] in _ROOTS or word.startswith("+")


def _filled(text: str, variables: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        if name in variables:
            return variables[name]
        return _filled(default, variables) if default is not None else found[0]

    return _VARIABLE.sub(value, text)
