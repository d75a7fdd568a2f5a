"""Modes in which a conversation continues, in tokens, after a turn of the policy.

    MessageChat      each turn and each observation is a message: ...answer<end> <user> observation <assistant>
    SingleAnswer     all of them continue one assistant message:  ...answer observation
    WholeHistory     the template renders the whole conversation again for each turn

The first two keep sampled tokens as they are. The text between them is tokenized separately, after a fixed
conversation, so that its tokens do not depend on what was sampled. In the third, a turn whose prompt does not start
with the tokens of the row so far begins a new row, so that training still uses the sampled tokens after the prompt that
they were sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import evolve, frozen

from skyrl.chats.continuation import Continuation
from skyrl.chats.rendering import Message, Spelled, Template
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import GeneratorConfig
from skyrl.inference.engine import Completion
from skyrl.rollout.transcript import Transcript


@frozen(kw_only=True)
class ChatTurn:
    """The latest turn of a conversation."""

    completion: Completion
    observations: Sequence[Message]
    prompt: Sequence[Message]
    """Messages that the conversation began with."""

    messages: Sequence[Message]
    """Messages since then, this turn and its observations included."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the environment, which the template shows."""


class Chat(Protocol):
    """One of the modes of a multi-turn conversation."""

    def go_on(self, transcript: Transcript, turn: ChatTurn) -> Transcript:
        """The transcript that the next turn starts from: the same one with the observations added, or another one."""

    def end(self, transcript: Transcript, completion: Completion) -> None:
        """Add the tokens that belong after the last turn. None by default: it ends where the policy ended it."""
        return  # with a body, no subclass has to define it


class MessageChat(Chat):
    """Token-in, token-out: the template writes the observations, and the end of a turn that has none yet."""

    def __init__(self, tokenizer: ChatTokenizer, config: GeneratorConfig) -> None:
        self._tokenizer = tokenizer
        self._closes_stopped_turns = config.append_eos_token_after_stop_str_in_multi_turn
        self._continuation = Continuation(
            tokenizer, config.chat_template_kwargs, closes_stopped_turns=self._closes_stopped_turns
        )

    def go_on(self, transcript: Transcript, turn: ChatTurn) -> Transcript:
        sampled, stopped = turn.completion.token_ids, turn.completion.stop_reason == "stop"
        transcript.place(self._continuation.tokens_after(sampled, turn.observations, turn.tools, stopped=stopped))
        return transcript

    def end(self, transcript: Transcript, completion: Completion) -> None:
        stopped = completion.stop_reason == "stop" and completion.token_ids
        if self._closes_stopped_turns and stopped and completion.token_ids[-1] not in self._continuation.special:
            transcript.place((self._tokenizer.eos_token_id,))


class SingleAnswer(Chat):
    """One assistant message: observations are plain text in it, and an end token sampled before them is removed."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self._spelled = tokenizer, Spelled.for_tokenizer(tokenizer)

    def go_on(self, transcript: Transcript, turn: ChatTurn) -> Transcript:
        sampled = turn.completion.token_ids
        if sampled and sampled[-1] in self._tokenizer.all_special_ids:
            transcript.withdraw(1)
        text = "".join(str(message["content"]) for message in turn.observations)
        transcript.place(self._spelled.plain(text, before=turn.completion.text))
        return transcript


class WholeHistory(Chat):
    """The template renders the whole conversation for each turn; a turn that does not continue the tokens of the
    previous one begins another row.
    """

    def __init__(self, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any], *, join: bool) -> None:
        """With `join`, a turn that continues the previous tokens belongs to their row; otherwise each turn is a row."""
        self._template, self._join = Template(tokenizer=tokenizer, arguments=template_kwargs), join

    def go_on(self, transcript: Transcript, turn: ChatTurn) -> Transcript:
        ids = evolve(self._template, tools=turn.tools).history(turn.prompt, turn.messages)
        before = transcript.input_ids
        if not self._join or ids[: len(before)] != before:
            return transcript.restarted(ids)
        transcript.place(ids[len(before) :])
        return transcript


def chat_of(config: GeneratorConfig, tokenizer: ChatTokenizer) -> Chat:
    """The mode that the configuration asks for; the tokenizer has the configured template."""
    if not config.use_conversation_multi_turn:
        return SingleAnswer(tokenizer)
    if config.step_wise_trajectories or config.chat_template.name_or_path is not None:
        join = config.merge_stepwise_output or not config.step_wise_trajectories
        return WholeHistory(tokenizer, config.chat_template_kwargs, join=join)
    return MessageChat(tokenizer, config)
