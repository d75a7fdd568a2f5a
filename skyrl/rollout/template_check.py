"""Is a chat template safe for token-in, token-out? Does it write a conversation the same, turn by turn and as a whole?

Training is exact with any template: sampled tokens are never written anew. But a template that leaves earlier thoughts
out, or writes an answer other than it was sampled, shows the model another conversation where it is used afterwards, by
whoever renders the whole history, than it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from attrs import frozen

from skyrl.config import GeneratorConfig
from skyrl.errors import DataError
from skyrl.rollout.chats import ANSWER, FIXED, Message, render

_ASKED: Message = {"role": "user", "content": "What is 2+2?"}

DIALOGUES: Mapping[str, tuple[str, Message, str]] = {
    # name: first answer, observation, second answer
    "two turns": ("Four.", {"role": "user", "content": "Are you sure?"}, "Yes."),
    "thoughts in the first turn": (
        "<think>\nTwo and two.\n</think>\n\nFour.",
        {"role": "user", "content": "Are you sure?"},
        "Yes.",
    ),
    "a tool's answer": ("I shall look.", {"role": "tool", "content": "4"}, "Four."),
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
    kwargs = (config or GeneratorConfig()).chat_template_kwargs
    return tuple(_verdict(tokenizer, name, kwargs) for name in DIALOGUES)


def _verdict(tokenizer: Any, name: str, kwargs: Mapping[str, Any]) -> Verdict:
    first, observation, second = DIALOGUES[name]
    said: Sequence[Message] = [{"role": "assistant", "content": first}, observation]
    try:
        start = render(tokenizer, [_ASKED], kwargs)
        between = render(tokenizer, [*FIXED, observation], kwargs).partition(ANSWER)[2]
        ours = start + first + between + second
        last = {"role": "assistant", "content": second}
        whole = render(tokenizer, [_ASKED, *said, last], kwargs, ask=False)
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
