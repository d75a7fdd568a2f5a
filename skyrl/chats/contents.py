"""The parts of a message, and whether a text contains them: a chat template may drop thoughts, calls or results.

A part counts as contained if its text occurs verbatim, without surrounding white space, or in its JSON spelling.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from attrs import frozen

from skyrl.chats.text import Message
from skyrl.errors import DroppedPartsError

ALLOW_DROPPED = "allow_dropped_content"
"""Column of a row that is used although the chat template drops some of its content."""

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry thoughts outside of `content`; templates read one of them or none."""

RESULTS = ("tool", "function", "ipython")
"""Roles of messages with the result of a tool call."""

ROLES = ("system", "developer", "user", "assistant", *RESULTS)
"""Roles that chat templates write. One with other roles names them in its text."""


def split_thoughts(message: Message) -> tuple[str, str]:
    """Thoughts of an assistant's message and the rest of its content; ("", content) if it has none.

    In a content they come first; if the header opens them, the text has only the closing tag.
    """
    content = message.get("content") or ""
    for name in THOUGHT_FIELDS:
        if isinstance(message.get(name), str) and message[name]:
            return message[name], content
    inside, closing, rest = content.partition("</think>")
    thought = inside.lstrip().removeprefix("<think>")
    if message.get("role") != "assistant" or not closing or "<think>" in thought:
        return "", content
    return thought.strip("\n"), rest.lstrip("\n")


def is_empty(message: Message) -> bool:
    """Whether a message has neither text nor thoughts nor a tool call."""
    return not any(part.strip() for part in split_thoughts(message)) and not any(calls_of(message))


@frozen
class Blanks:
    """Parts of rows that say nothing."""

    prompts: int = 0
    """Number of prompts of which no message has text, the system message aside."""

    answers: int = 0
    """Number of learned or compared answers without text, thoughts or tool calls."""

    def __add__(self, other: Blanks) -> Blanks:
        return Blanks(self.prompts + other.prompts, self.answers + other.answers)

    def sentences(self, rows: str) -> Iterator[str]:
        """A sentence for each kind that there is. `rows` names the rows, such as `training rows`."""
        if self.prompts:
            yield f"{self.prompts} prompts in {rows} are empty: nothing is asked"
        if self.answers:
            yield f"{self.answers} answers in {rows} are empty: they teach to end at once"


def asks_nothing(prompt: Iterable[Message]) -> bool:
    """Whether no message of a prompt has text, the system message aside; false for a prompt without messages."""
    messages = [message for message in prompt if message.get("role") != "system"]
    return bool(messages) and all(map(is_empty, messages))


def blanks_of(chat: Sequence[Message], answers: Collection[int]) -> Blanks:
    """Blanks of a chat whose messages with these indices are its answers; what precedes the first is the prompt."""
    return Blanks(int(asks_nothing(chat[: min(answers)])), sum(is_empty(chat[index]) for index in answers))


def has_call_list(message: Message) -> bool:
    """Whether the `tool_calls` of a message are a list of tables; also true for a message without any."""
    calls = message.get("tool_calls") or ()
    return isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)


def calls_of(message: Message) -> Iterator[Mapping[str, Any]]:
    """Name and arguments of each tool call, whether they are nested in `function` or not."""
    for call in message.get("tool_calls") or ():
        yield call["function"] if isinstance(call.get("function"), Mapping) else call


@frozen
class DroppedPart:
    """A part of a message, or a tool, that is missing in a text."""

    description: str

    of_role: bool = False
    """Whether a template that drops it writes other roles: the content or the name of a message."""

    tool: str = ""
    """Name of the tool; empty for a part of a message."""


def dropped(message: Message, text: str, *, thoughts: bool = True) -> list[DroppedPart]:
    """The parts of a message that are missing in `text`; `thoughts=False` ignores thoughts."""
    thought, rest = split_thoughts(message)
    missing = []
    if thoughts and not holds(text, thought):
        missing.append(DroppedPart(f"the thoughts ({short(thought)})"))
    of_role = [("content", rest)]
    if message.get("role") not in RESULTS and message.get("name"):  # a result belongs to its call, named or not
        of_role.append(("name", str(message["name"])))
    for label, part in of_role:
        if not holds(text, part):
            description = f"the {label} of a message of {message.get('role')} ({short(part)})"
            missing.append(DroppedPart(description, of_role=True))
    for call in calls_of(message):
        name = str(call.get("name", ""))
        if not holds(text, name):
            missing.append(DroppedPart(f"the call of {name}"))
        elif not _holds_arguments(text, call.get("arguments")):
            missing.append(DroppedPart(f"the arguments of the call of {name} ({short(call.get('arguments'))})"))
    return missing


DESCRIBE_TOOLS = "describe the environment's tools in the prompt and let tool_schemas() return ()"
"""Advice to authors of environments whose tools a template does not show."""


def leaves_out(missing: Sequence[DroppedPart]) -> DroppedPartsError:
    """The error for a conversation of which a chat template drops these parts."""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    roles = "a role that it writes, or " if any(part.of_role for part in missing) else ""
    parts = ", ".join(part.description for part in missing[:3])
    return DroppedPartsError(
        f"the chat template leaves out {parts}{more}: use {roles}another template (chat_template), or "
        f"set {ALLOW_DROPPED} in the row to train on what is left",
        tools=[part.tool for part in missing if part.tool],
    )


def dropped_tools(tools: Sequence[Any], text: str) -> list[DroppedPart]:
    """The tools whose names are missing in `text`."""
    return [DroppedPart(f"the tool {name}", tool=name) for name in map(tool_name, tools) if name and name not in text]


def tool_name(tool: object) -> str | None:
    """Name of a tool in the form of JSON schemas, nested in `function` or not; None for anything else."""
    entry = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    return str(entry["name"]) if isinstance(entry, Mapping) and entry.get("name") else None


def with_tools(
    tools: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """The tools, followed by those of `others` that have other names."""
    names = {*map(tool_name, tools)}
    return (*tools, *(tool for tool in others if tool_name(tool) not in names))


def holds(text: str, words: str) -> bool:
    """Whether `text` contains the words verbatim or in their JSON spelling, whether it changes their case or not."""
    words = words.strip()
    if words in text or any(json.dumps(words, ensure_ascii=plain)[1:-1] in text for plain in (False, True)):
        return True
    return words.casefold() in text.casefold()


def _holds_arguments(text: str, written: object) -> bool:
    arguments = written
    if isinstance(written, str):
        try:
            arguments = json.loads(written)
        except ValueError:
            return holds(text, written)
    forms = product(((", ", ": "), (",", ":")), (False, True))
    if any(json.dumps(arguments, separators=between, ensure_ascii=plain) in text for between, plain in forms):
        return True
    if isinstance(arguments, Mapping | list) and arguments and repr(arguments) in text:
        return False  # in Python's notation: the template expects a text
    return all(holds(text, leaf) for leaf in _leaves(arguments))


def _leaves(value: object) -> Iterator[str]:
    """All keys and values at any depth, as text."""
    match value:
        case Mapping():
            for key, inner in value.items():
                yield str(key)
                yield from _leaves(inner)
        case list() | tuple():
            for inner in value:
                yield from _leaves(inner)
        case str():
            yield value
        case bool() | None:
            pass  # templates write them as true, True, null, None or nothing
        case _:
            yield json.dumps(value)


def short(value: object) -> str:
    """The value shortened for a one-line message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
