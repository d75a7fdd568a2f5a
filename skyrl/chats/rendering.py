"""Conversations through the chat template, as text and as tokens.

Messages of an episode are plain text. If they spell a special token, such as `<|im_end|>`, it is tokenized as ordinary
characters: nothing that an environment, a tool or the policy writes can end or begin a turn. The initial prompt comes
from the user, so special tokens in it are recognised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from skyrl.chats.contents import DroppedPart, dropped, dropped_tools, holds, short
from skyrl.chats.spellings import FullestSpelling, Spelling
from skyrl.chats.text import CONTEXT, Message, chat_text, chat_texts, continued_tokens, placeholder, text_tokens
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

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
    def for_tokenizer(cls, tokenizer: ChatTokenizer) -> Spelled:
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
                return self.pattern.sub(lambda match: _MARK.format(self.texts.index(match[0])), value)
            case Mapping():
                return {name: self._marked(entry) for name, entry in value.items()}
            case list() | tuple():
                return [self._marked(item) for item in value]
        return value

    def ids(self, text: str, before: str = "") -> tuple[int, ...]:
        """Tokens of a text that follows another one; each mark in it becomes the characters that it stands for."""
        ids: list[int] = []
        for index, part in enumerate(self.marks.split(text)):
            piece = self.texts[int(part)] if index % 2 else part
            options = {"split_special_tokens": True} if index % 2 else {}
            ids += continued_tokens(self.tokenizer, before, piece, **options)
            before = (before + piece)[-CONTEXT:]
        return tuple(ids)

    def plain(self, text: str, before: str = "") -> tuple[int, ...]:
        """Tokens of a text that follows another one, without recognising special tokens."""
        return tuple(continued_tokens(self.tokenizer, before, text, split_special_tokens=True))


@frozen(kw_only=True)
class Template:
    """A tokenizer's chat template, with the arguments and tools of each call."""

    tokenizer: Any
    arguments: Mapping[str, Any]
    """Arguments of the template: `generator.chat_template_kwargs`."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the environment, which the template shows."""

    spelled: Spelled = field(repr=False)

    _fullest: FullestSpelling[str] = field(factory=FullestSpelling, repr=False, eq=False)
    _forms: dict[object, tuple[Sequence[int], bool]] = field(factory=dict, repr=False, eq=False)
    """Parts that the template passes over, by the form of a conversation; see `_passed_over`."""

    @spelled.default
    def _default_spelled(self) -> Spelled:
        return Spelled.for_tokenizer(self.tokenizer)

    def text(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """A conversation as rendered by the template, with or without the generation prompt. Raises `DataError`."""
        extra_arguments = {"tools": [dict(tool) for tool in self.tools]} if self.tools else {}
        return chat_text(
            self.tokenizer, messages, generation_prompt=generation_prompt, **{**self.arguments, **extra_arguments}
        )

    def prompt(self, messages: Sequence[Message], *, allow_dropped: bool = False) -> str:
        """The text that is sampled after: a conversation and the generation prompt, or the beginning of the answer if
        the last message is the assistant's, which is then continued (as by transformers' `continue_final_message`).

        The conversation is written in the spelling of which the template drops the least. Raises `DataError` for one of
        which it drops a part, unless `allow_dropped`; thoughts of earlier messages may be dropped, as usual for models.
        """
        prefill_index = len(messages) - 1 if begins_an_answer(messages) else None
        if prefill_index is not None and messages[-1].get("tool_calls"):
            raise DataError("the last message is a tool call of the assistant without its result: add the result")

        def write(spelling: Spelling) -> str:
            return self._prompt_text(spelling.spell(messages), continues=prefill_index is not None)

        def missing(text: str) -> Iterator[DroppedPart]:
            parts = [dropped(message, text, thoughts=index == prefill_index) for index, message in enumerate(messages)]
            tools = dropped_tools(self.tools, text)
            hidden, ignores_tools = ((), False) if tools or any(parts) else self._passed_over(messages)
            for index, message in enumerate(messages):
                yield from parts[index] or (dropped(message, "", thoughts=False)[:1] if index in hidden else ())
            yield from dropped_tools(self.tools, "") if ignores_tools else tools

        return self._fullest(messages, write, missing=missing, text_of=str, allow_dropped=allow_dropped)

    def prompts(self, chats: Sequence[Sequence[Message]]) -> list[str | None]:
        """The texts of `prompt`, rendered in one call, which is faster; None for each conversation that needs `prompt`:
        one that can be spelled in several ways, or of which the template drops a part. Raises `DataError`.
        """
        plain = [index for index, messages in enumerate(chats) if all(map(_is_plain, messages))]
        texts: list[str | None] = [None] * len(chats)
        for index, text in zip(
            plain, chat_texts(self.tokenizer, [chats[p] for p in plain], **self.arguments), strict=True
        ):
            written = all(holds(text, message["content"]) for message in chats[index])
            if written and not self._passed_over(chats[index])[0]:
                texts[index] = text
        return texts

    def _prompt_text(self, messages: Sequence[Message], *, continues: bool) -> str:
        template = evolve(self, arguments={**self.arguments, "continue_final_message": True}) if continues else self
        return template.text(messages, generation_prompt=not continues)

    def _passed_over(self, messages: Sequence[Message]) -> tuple[Sequence[int], bool]:
        """Indices of the messages that the template passes over, and whether it ignores the tools.

        A short content or name may occur in the text anyway, so that a conversation of the same form is rendered, once,
        with a mark as each content, with and without tools.
        """
        form = (tuple((message["role"], *sorted(filter(message.get, message))) for message in messages), not self.tools)
        if form not in self._forms:
            marks = {index: _MARK.format(index) for index, message in enumerate(messages) if message.get("content")}
            marked = [{**message, "content": marks.get(index, "")} for index, message in enumerate(messages)]
            continues = begins_an_answer(messages)
            try:
                text = self._prompt_text(marked, continues=continues)
                hidden = tuple(index for index, mark in marks.items() if not holds(text, mark))
                plain = evolve(self, tools=())._prompt_text(marked, continues=continues) if self.tools else ""
                self._forms[form] = (hidden, plain == text)
            except DataError:  # the template reads contents, and refuses these
                self._forms[form] = ((), False)
        return self._forms[form]

    def start(self, messages: Sequence[Message], *, allow_dropped: bool = False) -> tuple[int, ...]:
        """The tokens that an episode begins with. Raises `DataError` as `prompt` does."""
        return tuple(text_tokens(self.tokenizer, self.prompt(messages, allow_dropped=allow_dropped)))

    def history(self, prompt: Sequence[Message], messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of the whole conversation: the initial prompt and the messages since. Raises `DataError`, also if
        the template drops a message that is not the assistant's.
        """
        marked = [*map(self.spelled.marked, messages)]
        text = self.text([*prompt, *marked])
        _refuse_dropped(marked, text)
        return self.spelled.ids(text)

    def tokens_after(
        self, conversation: Sequence[Message], stem: str, messages: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """The tokens that the template writes after the text `stem` when the conversation continues with `messages`;
        None if the template drops that text. Raises `DataError`, also if the template drops one of them that is not the
        assistant's.
        """
        marked = [*map(self.spelled.marked, messages)]
        _, separator, rest = self.text([*conversation, *marked]).partition(stem)
        if not separator:
            return None
        _refuse_dropped(marked, rest)
        return self.spelled.ids(rest, before=stem)


def _is_plain(message: Message) -> bool:
    """Whether a message has a single spelling: only a content, which is not the assistant's."""
    return len(message) == 2 and "content" in message and message.get("role") not in ("assistant", None)


def begins_an_answer(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the assistant's answer, which the policy continues."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def _refuse_dropped(messages: Sequence[Message], text: str) -> None:
    """Raises `DataError` if the text lacks the content of a message that is not the assistant's."""
    missing = [
        f"the content of a message of {message.get('role')} ({short(message['content'])})"
        for message in messages
        if message.get("role") != "assistant" and not holds(text, message.get("content") or "")
    ]
    if missing:
        raise DataError(
            f"the chat template leaves out {', '.join(missing[:3])}: use a role that it writes, or another template "
            "(chat_template)"
        )
