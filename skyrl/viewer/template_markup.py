"""Markup of chat templates in text: headers that begin a message and name its role, and tokens that end one.

It is recognised by its form, as the files of a run do not have the template. Known are the forms of ChatML (Qwen and
others), Llama 3, Gemma, GLM, Phi, DeepSeek and Harmony.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import frozen

_HEADER = (
    r"<\|im_start\|>(\w+)\n?",
    r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n{0,2}",
    r"<start_of_turn>(\w+)\n?",
    r"<\|(system|user|assistant|tool|observation|environment)\|>\n?",
    r"<\uff5c(User|Assistant)\uff5c>",
    r"<\|start\|>(\w+)(?:<\|channel\|>\w+)?<\|message\|>",
)
_TOKEN = r"<\|[\w▁-]{1,40}\|>|<\uff5c[\w▁-]{1,40}\uff5c>|<(?:start_of_turn|end_of_turn|bos|eos|pad|unk|/?s)>|\[/?INST\]"
_MARKUP = re.compile(rf"(?:{'|'.join(_HEADER)})|(?:{_TOKEN})")
_SPECIAL = re.compile(_TOKEN)


@frozen(kw_only=True)
class Stretch:
    """Consecutive characters of a text."""

    text: str
    role: str = ""
    """Role of the message that the text belongs to; empty before the first header."""

    is_markup: bool = False


def is_special(text: str) -> bool:
    """Whether the text of one token has the form of a special token."""
    return bool(_SPECIAL.fullmatch(text))


def stretches(text: str) -> Iterator[Stretch]:
    """The text in stretches of content and of markup. White space between two stretches of markup is markup."""
    role, end = "", 0
    for match in _MARKUP.finditer(text):
        if between := text[end : match.start()]:
            yield Stretch(text=between, role=role, is_markup=not between.strip())
        role = next((name.lower() for name in match.groups() if name), role)
        yield Stretch(text=match[0], role=role, is_markup=True)
        end = match.end()
    if rest := text[end:]:
        yield Stretch(text=rest, role=role, is_markup=bool(end) and not rest.strip())
