"""What is learned of nine forms of chat, over all families: equal to files that a reader can check."""

from __future__ import annotations

import pytest

from skyrl.chats.examples import FORMS, forms_page
from tests.chats.corpus import GOLDEN, NAMES, golden_file, tokenizer_of


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_each_form_is_learned_as_the_golden_file_of_the_family_has_it(name: str) -> None:
    assert forms_page(tokenizer_of(name)) == golden_file(name).read_text(encoding="utf-8")


def test_the_golden_files_are_of_at_least_twenty_families_and_nine_forms() -> None:
    assert len(NAMES) >= 20 and len(FORMS) == 9
    assert {file.name for file in GOLDEN.iterdir()} == {golden_file(name).name for name in NAMES}
