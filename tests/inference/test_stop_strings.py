"""Stop strings in the text of an answer, with a tokenizer that has a token for each byte."""

from __future__ import annotations

import pytest

from skyrl.inference.stop_strings import completed, text_of
from tests.rollout.chats import chat_tokenizer


@pytest.mark.parametrize(
    ("sampled", "stops", "text"),
    [
        ("say 3.", ("3",), "say 3"),
        ("say 3<|im_end|>", ("<|im_end|>",), "say 3<|im_end|>"),
        ("say 3<|im_end|>", ("3<|im_end|>",), "say 3<|im_end|>"),
        ("say 3<|im_end|>\n", ("<|im_end|>\n",), "say 3<|im_end|>\n"),
        ("say 3<|im_end|>\nx", ("3<|im_end|>\n",), "say 3<|im_end|>\n"),
        ("a<|im_start|>b3<|im_end|>", ("3<|im_end|>",), "ab3<|im_end|>"),
        ("say 3<|im_end|>", ("nowhere", "y 3<|im_end|>"), "say 3<|im_end|>"),
        ("say 3<|im_end|>", ("nowhere",), "say 3"),
        ("say 3<|im_end|>", (), "say 3"),
    ],
)
def test_an_answer_ends_with_its_stop_string_once(sampled: str, stops: tuple[str, ...], text: str) -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer.encode(sampled, add_special_tokens=False)
    assert text_of(tokenizer, ids, stops) == text
    assert completed(tokenizer, ids, stops) == any(stop in sampled for stop in stops)
