"""Conversations through the chat template, as text and as tokens.

Messages of an episode are plain text. If they spell a special token, such as `<|im_end|>`, it is tokenized as ordinary
characters: nothing that an environment, a tool or the policy writes can end or begin a turn. The initial prompt comes
from the user, so special tokens in it are recognised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from skyrl.chats.text import CONTEXT, chat_text, continued_tokens, placeholder, text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

Message = Mapping[str, Any]

_MARK = placeholder("text") + "-{}-"
"""Placeholder of a spelled special token, by its index, while the template renders the conversation."""


@frozen
class Spelled:
    """The special tokens of a tokenizer, whose texts are to be treated as ordinary characters."""

    tokenizer: Any
    texts: tuple[str, ...]
    pattern: re.Pattern[str]
    """Matches each of the texts."""

    marks: re.Pattern[str]
    """Matches the mark of each of the texts, also if the template has changed its case, and no other number."""

    @classmethod
    def by(cls, tokenizer: ChatTokenizer) -> Spelled:
        """Special tokens that the tokenizer would recognise in a text, longer ones first."""
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
        ordered = tuple(sorted(filter(None, texts), key=lambda text: (-len(text), text)))
        numbers = "|".join(map(str, range(len(ordered)))) or "(?!)"
        marks = re.compile(_MARK.format(f"({numbers})"), re.IGNORECASE)
        return cls(tokenizer, ordered, re.compile("|".join(map(re.escape, ordered)) or r"(?!)"), marks)

    def marked(self, message: Message) -> Message:
        """The message, with a mark in place of each spelled special token, in nested values too."""
        return {name: value if name == "role" else self._marked(value) for name, value in message.items()}

    def _marked(self, value: object) -> object:
        match value:
            case str():
                return self.pattern.sub(self._mark, value)
            case Mapping():
                return {name: self._marked(each) for name, each in value.items()}
            case list() | tuple():
                return [self._marked(each) for each in value]
        return value

    def ids(self, text: str, before: str = "") -> tuple[int, ...]:
        """Tokens of a text that follows another one; each mark in it becomes the characters that it stands for."""
        ids: list[int] = []
        for place, part in enumerate(self.marks.split(text)):
            shown = self.texts[int(part)] if place % 2 else part
            options = {"split_special_tokens": True} if place % 2 else {}
            ids += continued_tokens(self.tokenizer, before, shown, **options)
            before = (before + shown)[-CONTEXT:]
        return tuple(ids)

    def plain(self, text: str, before: str = "") -> tuple[int, ...]:
        """Tokens of a text that follows another one, without recognising special tokens."""
        return tuple(continued_tokens(self.tokenizer, before, text, split_special_tokens=True))

    def _mark(self, found: re.Match[str]) -> str:
        return _MARK.format(self.texts.index(found[0]))


@frozen(kw_only=True)
class Template:
    """A tokenizer's chat template, with the arguments and tools of each call."""

    tokenizer: Any
    arguments: Mapping[str, Any]
    """Arguments of the template: `generator.chat_template_kwargs`."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the environment, which the template shows."""

    spelled: Spelled = field(repr=False)

    @spelled.default
    def _of_tokenizer(self) -> Spelled:
        return Spelled.by(self.tokenizer)

    def text(self, messages: Sequence[Message], *, ask: bool = True) -> str:
        """A conversation as rendered by the template; `ask` adds the generation prompt. Raises `DataError`."""
        shown = {"tools": [dict(tool) for tool in self.tools]} if self.tools else {}
        return chat_text(self.tokenizer, messages, ask=ask, **{**self.arguments, **shown})

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens that an episode begins with. Raises `DataError`, also if the template does not show the tools."""
        text = self.text(messages)
        if self.tools and text == evolve(self, tools=()).text(messages):
            raise DataError(
                "the environment has tools, but the chat template does not show them: use a model whose template "
                "writes `tools`, or describe them in the prompt and let tool_schemas() return ()"
            )
        return _encode(self.tokenizer, text)

    def history(self, prompt: Sequence[Message], said: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of the whole conversation: the initial prompt and the messages since. Raises `DataError`."""
        return self.spelled.ids(self.text([*prompt, *map(self.spelled.marked, said)]))

    def after(self, conversation: Sequence[Message], stem: str, said: Sequence[Message]) -> tuple[int, ...] | None:
        """The tokens that the template writes after the text `stem` when the conversation continues with `said`; None
        if the template drops that text. Raises `DataError`.
        """
        _, found, rest = self.text([*conversation, *map(self.spelled.marked, said)]).partition(stem)
        return self.spelled.ids(rest, before=stem) if found else None


def _encode(tokenizer: ChatTokenizer, text: str, **options: object) -> tuple[int, ...]:
    """Token ids of a text. Raises `TextError`."""
    return tuple(text_tokens(tokenizer, text, **options))
