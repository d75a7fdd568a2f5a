"""Shows the examples of docstrings as code: the text below `Example:` is Python."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n((?:    .*\n?|\n)+)", re.MULTILINE)


class ExamplesAsCode(griffe.Extension):
    """Turns the examples into fenced code before docstrings are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each class, function and module."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda found: fenced(found[1]), obj.docstring.value)


def fenced(code: str) -> str:
    """The indented code as a block."""
    return f"```python\n{dedent(code).strip()}\n```\n"
