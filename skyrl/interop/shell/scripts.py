"""Reads the `path=value` and `--name value` arguments in a shell script without running it.

Variables that the script itself sets are substituted, and so are the defaults of `${NAME:-default}` and of
`: "${NAME:=default}"`, and sums such as `$((1024 * 2))`. Anything that only a shell can evaluate, such as `$(date)`, is
left unchanged, and so is a variable that is not set.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from skyrl.interop.shell.arithmetic import calculated
from skyrl.interop.shell.variables import expanded

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_COMPUTED = re.compile(r"\s*(?:(?:export|readonly|local|declare|typeset)\s+)?([A-Za-z_]\w*)=[\"']?(?:\$\(|`)")
"""An assignment of a command's output to a variable."""

_DECLARATIONS = ("export", "readonly", "local", "declare", "typeset")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(?:\.[\w\"-]+)*=.*|~[A-Za-z_]\w*(?:\.\w+)+", re.DOTALL)
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_ARRAY_BEGINS = re.compile(r"[ \t]*[A-Za-z_]\w*\+?=\([ \t]*")
_ARRAY_ENDS = re.compile(r"[ \t]*\)[ \t]*")
_TEXT_OF_LINES = re.compile(r'^[ \t]*[A-Za-z_]\w*="[ \t]*\n[^"]*"[ \t]*$', re.MULTILINE)
_WHOLE_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_FLAGS = "--"
_ROOTS = ("data", "trainer", "generator", "environment", "hydra", "deepspeed_config")


LONGEST_LINE = 200_000
"""Length in characters up to which quotes in a line are parsed; longer lines are split at spaces."""


def overrides_in(script: str, roots: tuple[str, ...] = _ROOTS) -> list[str]:
    """Every override, in order, with quotes removed as a shell would.

    `name=value` without a dot is an override where `name` is one of `roots`, and otherwise an assignment of the shell.
    """
    return [each for words, variables in _commands(script) for each in _overrides(words, variables, roots)]


def commands_in(script: str) -> list[list[str]]:
    """The words of every command, and of every array, with variables filled in and quotes removed as a shell would."""
    return [
        [expanded(word, variables) for word in _split(words, variables, _FLAGS)]
        for words, variables in _commands(script)
    ]


def _commands(script: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The words of each command or array, and the variables that are set when it runs."""
    variables = {"HOME": "~"}  # paths of a configuration may begin with it
    for line in _logical_lines(script):
        line = calculated(line, variables)
        if not any(sign in line for sign in "=:~$-"):
            continue  # a line without assignments and arguments
        if computed := _COMPUTED.match(line):
            variables[computed[1]] = "$(...)"  # refused if a setting uses it
            continue
        words = _words(line)
        array = _ARRAY.match(words[0]) if words else None
        if words[:1] == [":"]:  # `: "${NAME:=default}"` sets NAME
            for word in words[1:]:
                expanded(word, variables)
        elif array:  # NAME=(trainer.epochs=2 ...)
            items = [words[0][array.end() :], *words[1:]]
            yield [item.rstrip(")") for item in items], variables
        elif words and all(_sets_variable(word) for word in words):
            _assign(words, variables)
        else:
            yield words, variables


def _overrides(words: list[str], variables: dict[str, str], roots: tuple[str, ...]) -> Iterator[str]:
    return (expanded(word, variables) for word in _split(words, variables) if _is_override(word, roots))


def _sets_variable(word: str) -> bool:
    return _ASSIGNMENT.fullmatch(word) is not None


def _assign(words: list[str], variables: dict[str, str]) -> None:
    for word in words:
        if assignment := _ASSIGNMENT.fullmatch(word):
            variables[assignment[1]] = expanded(assignment[2], variables)


def _logical_lines(script: str) -> list[str]:
    script = _TEXT_OF_LINES.sub(lambda found: _joined(found[0].splitlines()), _with_whole_arrays(script))
    joined = re.sub(r"\\\r?\n", " ", script)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def _with_whole_arrays(script: str) -> str:
    """The script with each array whose brackets have lines of their own on one line."""
    lines: list[str] = []
    array: list[str] = []
    for line in script.split("\n"):
        if not array and not _ARRAY_BEGINS.fullmatch(line):
            lines.append(line)
            continue
        array.append(line)
        if _ARRAY_ENDS.fullmatch(line):
            lines.append(_joined(array))
            array = []
    return "\n".join([*lines, *array])


def _joined(lines: Sequence[str]) -> str:
    return " ".join(map(_without_comment, lines))


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*", "", line)


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True) if len(line) <= LONGEST_LINE else line.split()
    except ValueError:  # a quote that is closed on another line
        words = line.split()
    if words[:1] and words[0] in _DECLARATIONS:
        words = [word for word in words[1:] if not word.startswith("-")]
    return [word.removesuffix(";") for word in words]


def _split(words: list[str], variables: dict[str, str], holds: str = "=") -> Iterator[str]:
    """The words, with each variable that contains several arguments split into separate words."""
    for word in words:
        whole = _WHOLE_VARIABLE.fullmatch(word)
        if whole and holds in variables.get(whole[1], ""):
            yield from _words(variables[whole[1]])
        else:
            yield word


def _is_override(word: str, roots: tuple[str, ...]) -> bool:
    root = re.match(r"[+~]{0,2}([A-Za-z_]\w*)", word)
    if not root or not _OVERRIDE.fullmatch(word):
        return False
    return "." in word.partition("=")[0] or root[1] in roots or word.startswith("+")
