"""A docstring stands alone, as an editor's hover shows it: it does not begin in the middle of a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import nodes_of
from tests.test_house import MODULES, ROOT

pytestmark = pytest.mark.xdist_group("house")

LEANS = re.compile(
    r"(Of|By|Also|Under|As|And|But|Or|Whoever|Whatever|Nobody|Those|Their|Whose|None of|With these|To it|It,|"
    r"(From|In|With|At|For) (which|whom)|"
    r"What (is|was|are|becomes|happens|has|may|can|must|stands|lies|came|comes|went|runs|it|the|a|an|each|every|to|of)"
    r")\b"
)
"""Openings that continue the name above, or ask a question in place of naming the thing."""


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a module, those beneath fields and constants included."""
    for node in nodes_of(file):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "leans"),
    [
        ("Of the next prompt, from 0.", True),
        ("What a checkpoint stores.", True),
        ("Epoch of the next prompt, counted from 0.", False),
        ("Asks the engines for one completion per key.", False),
    ],
)
def test_an_opening_that_leans_on_the_name_above_is_told_from_a_phrase(text: str, leans: bool) -> None:
    assert bool(LEANS.match(text)) is leans


def test_every_docstring_stands_alone() -> None:
    violations = {
        f"{module.relative_to(ROOT)}:{line}": text[:100]
        for module in MODULES
        for line, text in docstrings(module)
        if LEANS.match(text)
    }
    assert violations == {}


def test_files_named_in_docstrings_exist() -> None:
    """A name is read from the module's folder, from its package, or from `skyrl/`."""
    missing = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in MODULES
        for line, text in docstrings(file)
        for name in re.findall(r"`([\w/]+\.py)`", text)
        if not any((folder / name).exists() for folder in folders_of(file))
    ]
    assert missing == []


def folders_of(file: Path) -> list[Path]:
    package = file.relative_to(ROOT / "skyrl").parts[0]
    return [file.parent, ROOT / "skyrl" / package, ROOT / "skyrl", ROOT]
