"""Checks whether a chat template renders a conversation the same, turn by turn and as a whole.

Training is exact with any template, because sampled tokens are never rendered again. But if a template leaves out
earlier thoughts, or renders an answer differently from how it was sampled, an application that renders the whole
history shows the trained model another conversation than it was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from attrs import evolve, frozen

from skyrl.chats.continuation import FIXED
from skyrl.chats.examples import assistant, call, result, user
from skyrl.chats.rendering import Template
from skyrl.chats.spans import ANSWER
from skyrl.chats.text import Message
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.errors import DataError

_ASKED: Message = user("What is 2+2?")
_SURE: Message = user("Are you sure?")

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
"""A tool as environments offer it: with required parameters, which some templates write."""

CALLS: Message = assistant("", tool_calls=[call(a=2, b=2)])
"""A tool call in the form that Hugging Face's templates take; the sampled text is what the template writes for it."""


@frozen(kw_only=True)
class Dialogue:
    """Turns of the policy, and the observation after each of them but the last."""

    opening: Sequence[Message] = (_ASKED,)
    turns: Sequence[str | Message]
    """Turns of the dialogue: sampled text, or a message that the template renders."""

    observations: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


_SYSTEM: Message = {"role": "system", "content": "Be short."}
_THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."
_RESULT: Message = result("4")
_QUESTIONS: Sequence[Message] = tuple(user(f"And {n}+{n}?") for n in range(3, 7))

DIALOGUES: Mapping[str, Dialogue] = {
    "two turns": Dialogue(turns=("Four.", "Yes."), observations=(_SURE,)),
    "thoughts in the first turn": Dialogue(turns=(_THOUGHT, "Yes."), observations=(_SURE,)),
    "a tool's answer": Dialogue(turns=("I shall look.", "Four."), observations=({"role": "tool", "content": "4"},)),
    "a call of a tool": Dialogue(turns=(CALLS, "Four."), observations=(_RESULT,), tools=(TOOL,)),
    "a system message": Dialogue(opening=(_SYSTEM, _ASKED), turns=("Four.", "Yes."), observations=(_SURE,)),
    "white space around an answer": Dialogue(turns=("\n Four. \n", "Yes."), observations=(_SURE,)),
    "five turns": Dialogue(turns=("Four.", "Six.", "Eight.", "Ten.", "Twelve."), observations=_QUESTIONS),
    "five turns with everything": Dialogue(
        opening=(_SYSTEM, _ASKED),
        turns=(CALLS, _THOUGHT, CALLS, "Six.\n", "Yes."),
        observations=(_RESULT, _QUESTIONS[0], _RESULT, _SURE),
        tools=(TOOL,),
    ),
}


@frozen(kw_only=True)
class TemplateVerdict:
    """Result of checking a template on one dialogue."""

    dialogue: str
    outcome: Literal["stable", "differs", "refused"]
    turn_by_turn: str = ""
    """Text that is trained on where it differs, from a little before the first difference."""

    as_a_whole: str = ""
    """Text that the template writes there for the whole conversation, or the reason why it refuses the dialogue."""


def check_template(tokenizer: ChatTokenizer) -> tuple[TemplateVerdict, ...]:
    """A verdict for each dialogue of `DIALOGUES`."""
    template = Template(tokenizer=tokenizer, arguments={})
    return tuple(_verdict(template, name) for name in DIALOGUES)


def _verdict(template: Template, name: str) -> TemplateVerdict:
    try:
        for incremental, full in _compare_turns(evolve(template, tools=DIALOGUES[name].tools), DIALOGUES[name]):
            if not full.startswith(incremental):
                return _difference(name, incremental, full)
    except DataError as error:
        return TemplateVerdict(dialogue=name, outcome="refused", as_a_whole=str(error))
    return TemplateVerdict(dialogue=name, outcome="stable")


def _compare_turns(template: Template, dialogue: Dialogue) -> Iterator[tuple[str, str]]:
    """The conversation after each turn but the first, as it is trained on, and as the template writes it as a whole.

    Raises `DataError` for a dialogue that the template refuses.
    """
    template.start(dialogue.opening)  # which shows the tools
    messages = list(dialogue.opening)
    incremental = template.text(messages)
    for index, turn in enumerate(dialogue.turns):
        incremental += turn if isinstance(turn, str) else _written_call(template, template.text([_ASKED]))
        messages.append({"role": "assistant", "content": turn} if isinstance(turn, str) else turn)
        if index:
            yield incremental, template.text(messages, generation_prompt=False)
        for observation in dialogue.observations[index : index + 1]:
            incremental += template.text([*FIXED, observation]).partition(ANSWER)[2]
            messages.append(observation)


def _difference(name: str, incremental: str, full: str) -> TemplateVerdict:
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(incremental, full, strict=False)))
    start = max(0, alike - 30)
    return TemplateVerdict(
        dialogue=name,
        outcome="differs",
        turn_by_turn=incremental[start : start + 100],
        as_a_whole=full[start : start + 100],
    )


def _written_call(template: Template, start: str) -> str:
    """The call as the template writes it, up to where a turn ends. Raises `DataError` if it writes none."""
    full = template.text([_ASKED, CALLS], generation_prompt=False)
    if "add" not in full.removeprefix(template.text([_ASKED], generation_prompt=False)):
        raise DataError("the chat template writes no `tool_calls`: the calls of earlier turns would be left out")
    end = template.text(FIXED, generation_prompt=False).partition(ANSWER)[2]
    header = template.text([_ASKED], generation_prompt=False)
    written = full[len(start) :] if full.startswith(start) else full.removeprefix(header)
    return written.removesuffix(end)
