"""Chat formats: each family of `tests/rollout/families.py` and of `templates/`.

The templates behave as those that ship with the models they are named after; their text is ours. Tokens that a
tokenizer has as special ones or not are as there, so far as masks could depend on it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.rollout.chats import chat_tokenizer
from tests.rollout.families import FAMILIES

FOLDER = Path(__file__).parent / "templates"
SHIPPED = {file.stem: file for file in sorted(FOLDER.glob("*.jinja"))}
NAMES = (*FAMILIES, *SHIPPED)
GOLDEN = Path(__file__).parent / "golden"


def golden_file(name: str) -> Path:
    """What is learned of each form of chat, checked by hand."""
    return GOLDEN / f"{name.replace(' ', '_')}.txt"


_TOKENS = re.compile(
    r"<\|\w+\|>|\[/?[A-Z_]+\]|\[gMASK\]|<(?:start|end)_of_turn>|<bos>|<sop>|</?s>|</?tool_call>|</?think>"
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that Qwen's and GLM's tokenizers add as usual ones."""


@cache
def tokenizer_of(name: str) -> Any:
    """One token for each byte and each token that the format adds; `<|im_end|>` ends a sequence."""
    if name in FAMILIES:
        return chat_tokenizer(FAMILIES[name].template, FAMILIES[name].special)
    template = SHIPPED[name].read_text(encoding="utf-8")
    roles = ("system", "user", "assistant") if "<|{{" in template else ()
    tokens = dict.fromkeys([*_TOKENS.findall(template), *(f"<|{role}|>" for role in roles)])
    special = [token for token in tokens if token not in (*NOT_SPECIAL, "<|im_start|>", "<|im_end|>")]
    tokenizer = chat_tokenizer(template, special)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in tokens if token in NOT_SPECIAL])
    return tokenizer
