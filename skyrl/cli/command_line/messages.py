"""Prints messages on standard error: laid out for the width of a terminal and coloured there, plain anywhere else."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import click

from skyrl.errors import ConfigError, Problem, ProblemLine, ProblemPart, printable, problem_table
from skyrl.processes.redaction import redacted

_COLOURS: Mapping[ProblemPart, str] = {"path": "cyan", "location": "blue", "hint": "green"}
_LINE_OF_A_FILE = re.compile(r"\d+ \| |\s*\^$")
"""A line of a file that is shown, or the caret below it: neither can be wrapped."""


def say_error(error: BaseException) -> None:
    """Print an error of skyrl as its message."""
    if isinstance(error, ConfigError):
        say_problems(error.problems, error.title)
    else:
        say(str(error))


def say(text: str) -> None:
    """Print a message; on a terminal its lines are wrapped between words."""
    if sys.stderr.isatty():  # secrets are removed first: after a name they are found in the same line only
        text = "\n".join(part for line in redacted(text).split("\n") for part in _wrapped(line, _width()))
    click.echo(text, err=True)


def say_problems(problems: Sequence[Problem], title: str) -> None:
    """Print problems or warnings: as a table if it fits the terminal, otherwise with each message below its path."""
    lines = problem_table(problems, title)
    width = _width() if sys.stderr.isatty() else None
    if width is not None and max(len(_plain(line)) for line in lines) > width:
        lines = [*_wrapped_parts("title", _plain(lines[0]), width), *_stacked_lines(problems, width)]
    is_coloured = width is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    strongest = "yellow" if all(problem.severity == "warning" for problem in problems) else "red"
    click.echo("\n".join(_coloured(line, strongest) if is_coloured else _plain(line) for line in lines), err=True)


def _width() -> int:
    return shutil.get_terminal_size().columns


def _plain(line: ProblemLine) -> str:
    return "".join(text for _, text in line).rstrip()


def _coloured(line: ProblemLine, title: str) -> str:
    """The line with colours; that of the title is given."""
    colours = {**_COLOURS, "title": title}
    styled = (
        click.style(text, fg=colours[part], bold=part == "title" or None) if part in colours else text
        for part, text in line
    )
    return "".join(styled).rstrip()


def _stacked_lines(problems: Iterable[Problem], width: int) -> Iterator[ProblemLine]:
    """The path and the location of each problem on one line or two; below them the message and the advice."""
    for problem in problems:
        path, location = printable(problem.path), printable(problem.location)
        if path and location.startswith(path):
            yield (("location", f"  {location}"),)
        elif len(path) + len(location) + 4 <= width:
            yield (("path", f"  {path}  "), ("location", location))
        else:
            yield (("path", f"  {path}"),)
            yield (("location", f"  {location}"),)
        texts: tuple[tuple[ProblemPart, str], ...] = (("message", problem.message), ("hint", problem.hint))
        for part, text in texts:
            for line in text.splitlines():
                yield from _wrapped_parts(part, f"    {redacted(printable(line))}", width)


def _wrapped_parts(part: ProblemPart, text: str, width: int) -> Iterator[ProblemLine]:
    return (((part, line),) for line in _wrapped(text, width))


def _wrapped(line: str, width: int) -> Iterator[str]:
    """The line in parts of at most `width`, cut between words and indented alike. A word that is longer, a command to
    be copied and a line of a file stay whole.
    """
    words = line.lstrip(" ")
    indent = line[: len(line) - len(words)]
    if len(line) <= width or words.startswith("skyrl ") or _LINE_OF_A_FILE.match(words):
        yield line
        return
    part = ""
    for word in words.split(" "):
        if part and len(indent) + len(part) + 1 + len(word) > width:
            yield indent + part
            part = word
        else:
            part = f"{part} {word}" if part else word
    yield indent + part
