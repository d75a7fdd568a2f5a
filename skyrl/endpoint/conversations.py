"""Conversations of one trajectory, recorded as the tokens that were sampled and the tokens they were sampled from.

    continued(history) -> the turn that a request continues    record(...) -> Turn    branches() -> turns, row by row

A request whose history begins with an earlier request and its answer continues from the tokens of both: the engine's
own ids, never re-tokenized text. Any other history (compaction, a sub-agent, an edited message) starts a new branch,
and so does a second continuation of the same turn (parallel calls). Each sampled token is in exactly one branch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from threading import Lock
from typing import Any

from attrs import Factory, define, frozen

from skyrl.inference.engine import Completion

Message = Mapping[str, Any]


@frozen
class History:
    """The conversation in a request: messages, tools, and arguments of the chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = Factory(dict)


@define(eq=False)
class Turn:
    """One sampled answer."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    before: Turn | None
    """The turn whose tokens this one continues."""

    after: list[Turn] = Factory(list)
    """Turns that continue this one; the first belongs to its branch, each other begins a new branch."""

    text: str | None = None
    """Prompt and answer as text, for requests that give their prompt as text."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of prompt and answer."""
        return (*self.prompt_ids, *self.completion.token_ids)


class Conversations:
    """The turns of one trajectory, in the order in which they were recorded."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._changing, self._ended = Lock(), False
        self._by_history: dict[bytes, Turn] = {}

    def continued(self, history: History) -> tuple[Turn, tuple[Message, ...]] | None:
        """The latest turn that the history continues, and the messages after it; None if a new conversation begins."""
        digests = _digests(history)
        for count in range(len(digests), 0, -1):
            turn = self._by_history.get(digests[count - 1])
            if turn is not None and count < len(digests):
                return turn, history.messages[count:]
        return None

    def continued_ids(self, prompt_ids: tuple[int, ...]) -> Turn | None:
        """The turn with the most tokens that are a prefix of the prompt's token ids."""
        prefixes = (turn for turn in self.turns if prompt_ids[: len(turn.token_ids)] == turn.token_ids)
        return max(prefixes, key=lambda turn: len(turn.token_ids), default=None)

    def continued_text(self, prompt: str) -> Turn | None:
        """The turn with the longest text that is a prefix of the prompt."""
        prefixes = (turn for turn in self.turns if turn.text is not None and prompt.startswith(turn.text))
        return max(prefixes, key=lambda turn: len(turn.text or ""), default=None)

    def record(
        self,
        prompt_ids: tuple[int, ...],
        completion: Completion,
        before: Turn | None,
        *,
        history: History | None = None,
        reply: Message | None = None,
        text: str | None = None,
    ) -> None:
        """Record an answer as a turn. `reply` is the message that represents it in the history of a later request."""
        turn = Turn(prompt_ids, completion, before, text=text)
        with self._changing:
            if self._ended:
                return
            self.turns.append(turn)
            if before is not None:
                before.after.append(turn)
            if history is not None and reply is not None:
                new_history = History((*history.messages, reply), history.tools, history.arguments)
                self._by_history[_digests(new_history)[-1]] = turn

    def end(self) -> None:
        """Stop recording: answers that are still being sampled are ignored. Thread-safe."""
        with self._changing:
            self._ended = True

    def branches(self) -> list[list[Turn]]:
        """Lists of turns that continue each other, one per branch, ordered by the last turn of each branch."""
        order = {id(turn): number for number, turn in enumerate(self.turns)}
        branches = []
        for turn in self.turns:
            if turn.before is not None and turn.before.after[0] is turn:
                continue
            branch = [turn]
            while branch[-1].after:
                branch.append(branch[-1].after[0])
            branches.append(branch)
        return sorted(branches, key=lambda branch: order[id(branch[-1])])


def _digests(history: History) -> list[bytes]:
    """A digest for each prefix of a history."""
    state = blake2b(_canonical([history.tools, history.arguments]), digest_size=16)
    digests = []
    for message in history.messages:
        state.update(_canonical(_compared(message)))
        digests.append(state.copy().digest())
    return digests


def _compared(message: Message) -> list[object]:
    """Normalised content by which messages are compared: clients drop null fields and format call arguments
    differently.
    """
    functions = [call.get("function") or call for call in message.get("tool_calls") or ()]
    calls = [[function.get("name"), _parse_arguments(function.get("arguments"))] for function in functions]
    rest = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content", "tool_calls") and value is not None
    }
    return [message.get("role"), message.get("content") or "", calls, rest]


def _parse_arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=dict).encode("utf-8", "surrogatepass") + b"\0"
