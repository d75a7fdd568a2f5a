"""Pages that are made from code are what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.tree.classes import leaf_paths
from tests import field_pages
from tests.pages import PAGES, ROOT

WRITTEN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_its_tables_make_of_it(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert PAGES[page](text) == text, "make pages"


def test_the_pages_of_fields_are_those_that_the_classes_make() -> None:
    files = (ROOT / field_pages.FOLDER).rglob("*")
    written = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files if path.is_file()}
    assert written == field_pages.pages(), "make pages"


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_one_heading_with_facts_and_a_meaning(kind: str) -> None:
    folder = "" if kind == "rl" else f"{kind}/"
    pages = {
        file: text
        for file, text in field_pages.pages().items()
        if re.fullmatch(rf"{field_pages.FOLDER}/{folder}[^/]+\.md", file)
    }
    fields = re.findall(
        r"^### (\S+)\n\nType: .+ Default: `.+`\. May change on resume: [\w ]+`?\w*`?\.\n\n\S",
        "\n".join(pages.values()),
        re.MULTILINE,
    )
    assert sorted(fields) == sorted(path for path, _ in leaf_paths(root_of(kind)))


def test_a_condition_of_all_fields_of_a_table_is_said_once() -> None:
    page = field_pages.pages()["docs/fields/trainer.fully_async.md"] + field_pages.pages()["docs/fields/data.md"]
    assert page.count("only when the policy samples") == 1
    for file, text in field_pages.pages().items():
        for section in text.split("\n## "):
            conditions = re.findall(r"^Acts only when (.+)\.$", section, re.MULTILINE)
            fields = section.count("\n### ")
            assert not fields or all(conditions.count(condition) < fields for condition in conditions), file


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    broken, links = [], 0
    for page in WRITTEN:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            file, _, anchor = target.partition("#")
            linked = (page.parent / file).resolve() if file else page
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert links > 200
    assert broken == []


def test_the_index_has_every_page_and_every_example() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", text)}
    pages = {
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs").glob("*/README.md"),
        *(ROOT / "examples").glob("*/README.md"),
    }
    assert pages - linked == {ROOT / "docs" / "README.md"}
