"""Names that were replaced by the field's own do not come back: `replaced_names.md` is the list."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.test_house import ROOT

MEAN_SOMETHING_ELSE = {"Failure", "Limits", "WORDS"}
"""A failed sample of `skyrl.trajectory` keeps its name, httpx has a class of limits, an example a list of words."""

FOLDERS = ("benchmarks", "examples", "property_tests", "skyrl", "tests")


def old_names() -> set[str]:
    """What stands in backticks in the first column, modules (`course.py`) included."""
    table = (ROOT / "tests" / "replaced_names.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|") and "---" not in line]
    return {name for row in rows for name in re.findall(r"`([\w./]+)`", row)}


def identifiers(text: str) -> set[str]:
    """Names in the code of a module and in backticks in its strings and comments."""
    names: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            names.add(token.string)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            names |= quoted(token.string)
    return names


def quoted(text: str) -> set[str]:
    """The parts of dotted names in backticks, with or without a call: `RunLock.acquire()`."""
    return {part for name in re.findall(r"`([\w.]+)(?:\([^`\n]*\))?`", text) for part in name.split(".")}


def uses() -> Iterator[tuple[str, set[str]]]:
    """Every module and document, and the names that it uses."""
    for folder in FOLDERS:
        for module in sorted((ROOT / folder).rglob("*.py")):
            yield str(module.relative_to(ROOT)), identifiers(module.read_text(encoding="utf-8"))
    for page in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md"]:
        yield str(page.relative_to(ROOT)), quoted(page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def names() -> set[str]:
    replaced_names = {name for name in old_names() if not name.endswith(".py")} - MEAN_SOMETHING_ELSE
    assert len(replaced_names) > 40
    return replaced_names


@pytest.mark.long
def test_no_replaced_name_is_left_in_code_or_documents(names: set[str]) -> None:
    left = {location: sorted(used & names) for location, used in uses() if used & names}
    assert left == {}


def test_no_module_has_a_replaced_name() -> None:
    old = {name.rpartition("/")[2] for name in old_names() if name.endswith(".py")}
    modules = {module.name for module in (ROOT / "skyrl").rglob("*.py")}
    assert len(old) >= 5
    assert old & modules == set()
