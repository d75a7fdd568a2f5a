"""Is a chat template safe for token-in, token-out? Does it write a conversation the same, turn by turn and as a whole?

Training is exact with any template: sampled tokens are never written anew. But a template that leaves earlier thoughts
out, or writes an answer other than it was sampled, shows the model another conversation where it is used afterwards, by
whoever renders the whole history, than it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from attrs import evolve, frozen

from skyrl.chats.ends import ANSWER
from skyrl.config import GeneratorConfig
from skyrl.errors import DataError
from skyrl.rollout.chats import FIXED
from skyrl.rollout.rendering import Message, Template

_ASKED: Message = {"role": "user", "content": "What is 2+2?"}
_SURE: Message = {"role": "user", "content": "Are you sure?"}

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
"""A call as Hugging Face's templates are given one; what the policy samples for it is what the template writes."""


@frozen
class Dialogue:
    """Two turns, and what is observed between them."""

    first: str | Message
    """What is sampled, or a message whose text is the template's own."""

    observation: Message
    second: str
    tools: Sequence[Mapping[str, Any]] = ()


DIALOGUES: Mapping[str, Dialogue] = {
    "two turns": Dialogue("Four.", _SURE, "Yes."),
    "thoughts in the first turn": Dialogue("<think>\nTwo and two.\n</think>\n\nFour.", _SURE, "Yes."),
    "a tool's answer": Dialogue("I shall look.", {"role": "tool", "content": "4"}, "Four."),
    "a call of a tool": Dialogue(
        CALLS, {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "4"}, "Four.", (TOOL,)
    ),
}


@frozen(kw_only=True)
class Verdict:
    """What a template does with one dialogue."""

    dialogue: str
    outcome: Literal["stable", "differs", "refused"]
    turn_by_turn: str = ""
    """Where it differs: what is trained on, from a little before the first difference."""

    as_a_whole: str = ""
    """What the template writes there when it is given the whole conversation; or why it refuses the dialogue."""


def check_template(tokenizer: Any, config: GeneratorConfig | None = None) -> tuple[Verdict, ...]:
    """A verdict for each dialogue of `DIALOGUES`; `config` gives `chat_template_kwargs`."""
    arguments = (config or GeneratorConfig()).chat_template_kwargs
    template = Template(tokenizer=tokenizer, arguments=arguments)
    return tuple(_verdict(template, name) for name in DIALOGUES)


def _verdict(template: Template, name: str) -> Verdict:
    said = DIALOGUES[name]
    template = evolve(template, tools=said.tools)
    first = said.first if isinstance(said.first, Mapping) else {"role": "assistant", "content": said.first}
    try:
        template.start([_ASKED])  # which shows the tools
        start = template.text([_ASKED])
        sampled = said.first if isinstance(said.first, str) else _called(template, start)
        between = template.text([*FIXED, said.observation]).partition(ANSWER)[2]
        ours = start + sampled + between + said.second
        last = {"role": "assistant", "content": said.second}
        whole = template.text([_ASKED, first, said.observation, last], ask=False)
    except DataError as error:
        return Verdict(dialogue=name, outcome="refused", as_a_whole=str(error))
    if whole.startswith(ours):
        return Verdict(dialogue=name, outcome="stable")
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, whole, strict=False)))
    place = max(0, alike - 30)
    return Verdict(
        dialogue=name,
        outcome="differs",
        turn_by_turn=ours[place : place + 100],
        as_a_whole=whole[place : place + 100],
    )


def _called(template: Template, start: str) -> str:
    """The call as the template writes it, up to where a turn ends. Raises `DataError` if it writes none."""
    whole = template.text([_ASKED, CALLS], ask=False)
    if "add" not in whole.removeprefix(template.text([_ASKED], ask=False)):
        raise DataError("the chat template writes no `tool_calls`: the calls of earlier turns would be left out")
    end = template.text(FIXED, ask=False).partition(ANSWER)[2]
    header = template.text([_ASKED], ask=False)
    written = whole[len(start) :] if whole.startswith(start) else whole.removeprefix(header)
    return written.removesuffix(end)
