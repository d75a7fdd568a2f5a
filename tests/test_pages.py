"""Pages that are made from code are what the code says."""

from __future__ import annotations

import pytest

from tests.pages import PAGES, ROOT


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_its_tables_make_of_it(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert PAGES[page](text) == text, "make pages"
