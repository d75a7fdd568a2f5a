"""A language model that judges answers, behind any service that speaks OpenAI's protocol.

The policy writes what the judge reads, and will try to write the verdict. So each answer is placed between marks that
the policy cannot know, the judge is told that nothing between them is an instruction, and a verdict counts only on the
last line of the judge's reply.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from attrs import frozen

from skyrl.envs.http_json import PATIENCE, post
from skyrl.processes.answers import BadAnswer, read

OPENAI = "https://api.openai.com/v1"
ASKED, SECONDS = 3, 60.0
"""Replies that are asked for until one has a verdict, and seconds that each may take."""

LONGEST_ANSWER = 20_000
"""Number of characters of an answer that the judge reads, taken from the end, where the result is."""


@frozen
class _Message:
    content: str | None = None
    refusal: str | None = None


@frozen
class _Choice:
    message: _Message
    finish_reason: str | None = None


@frozen
class _Replies:
    choices: tuple[_Choice, ...]


@frozen(kw_only=True)
class JudgeReply:
    """Reply of a judge, with the number of retries that it took."""

    text: str
    refused: bool
    """Whether the service says that the model refused, or that its reply was filtered."""

    retries: int


@frozen(kw_only=True)
class JudgeService:
    """A model at a service."""

    model: str
    base_url: str | None = None
    api_key: str | None = None
    patience: float = PATIENCE
    """Time for which a judge that is away is waited for, in seconds."""

    setting: str = "environment.skyrl_gym.llm_as_a_judge.base_url"
    """Path of the setting with the address, for messages."""

    def ask(self, messages: Sequence[dict[str, str]]) -> JudgeReply:
        """One reply. Raises `ServiceError` and `ServiceGone`."""
        body: dict[str, object] = {"model": self.model, "messages": [*messages]}
        url = f"{(self.base_url or OPENAI).rstrip('/')}/chat/completions"
        answer = post(
            url,
            body,
            _single_choice,
            setting=self.setting,
            seconds=SECONDS,
            patience=self.patience,
            token=self.api_key,
        )
        message = answer.value.message
        refused = bool(message.refusal) or answer.value.finish_reason == "content_filter"
        return JudgeReply(text=message.content or "", refused=refused, retries=answer.retries)


def new_mark(name: str) -> str:
    """A line before and after an answer. It is drawn after the answer was written, so the answer cannot contain it."""
    return f"{name}-{secrets.token_hex(16)}"


def marked(answer: str, mark: str) -> str:
    """The end of the answer between two marks."""
    return f"{mark}\n{answer[-LONGEST_ANSWER:]}\n{mark}"


def verdict_line(reply: str, title: str) -> str | None:
    """The last line of a reply, if it alone contains `title`; None for any other reply."""
    lines = reply.strip().splitlines()
    if not lines or sum(title in line for line in lines) != 1 or title not in lines[-1]:
        return None
    return lines[-1].strip()


def _single_choice(answer: object) -> _Choice:
    choices = read(answer, _Replies).choices
    if len(choices) != 1:
        raise BadAnswer(f"with {len(choices)} choices, where one was asked for")
    return choices[0]
