"""OpenAI's `POST /v1/chat/completions`: messages and tools in, `n` messages out, complete or as a stream.

Beyond OpenAI's fields, as in vLLM: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`,
`chat_template_kwargs`, and `return_token_ids`, which adds `prompt_token_ids` to the answer and `token_ids` to each
choice; `weight_versions` gives the version of the weights that sampled each token.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from attrs import frozen

from skyrl.endpoint.conversations import History
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.live import LiveAnswers
from skyrl.endpoint.messages import SampledMessage, answer_of, messages_of, tools_of
from skyrl.endpoint.policy import MOST_ANSWERS, Policy, Prompt
from skyrl.endpoint.reply import Event, Events, Json, Reply, now
from skyrl.endpoint.sampling import Drawn, drawn
from skyrl.endpoint.trajectories import PlayedTrajectory
from skyrl.errors import RequestError

BOOKKEEPING = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
    *("prompt_cache_retention", "verbosity", "reasoning_effort"),
)
"""Bookkeeping fields of OpenAI's services, which are accepted and have no effect here."""

RESERVED = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template")


@frozen(kw_only=True)
class _Asked:
    """A parsed request."""

    model: str
    history: History
    drawn: Drawn
    n: int
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    token_ids: bool

    @property
    def stops(self) -> Sequence[str]:
        return self.drawn.sampling.stop or ()


@frozen
class _Answered:
    """The sampled answers of a request."""

    prompt: Prompt
    messages: Sequence[SampledMessage]
    logprobs: Sequence[Json | None]


async def chat(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> Reply:
    """Answer one request. Raises `RequestError`."""
    asked = _asked(body, policy, trajectory)
    if asked.stream:
        return Reply(events=_events(asked, policy, trajectory), ends_with_done=True)
    return Reply(_whole(asked, await _answered(asked, policy, trajectory)))


async def _answered(
    asked: _Asked, policy: Policy, trajectory: PlayedTrajectory | None, live: LiveAnswers | None = None
) -> _Answered:
    with policy.admitted(asked.n, trajectory):
        prompt = await policy.conversation(asked.history, trajectory)
        heard = None if live is None else live.listener(prompt)
        completions = await policy.sample(prompt, asked.drawn, asked.n, trajectory, heard)
        stops = [policy.stop_text(each, asked.drawn.sampling) for each in completions]
        answers = [
            answer_of(each, stop, tools=bool(asked.history.tools))
            for each, stop in zip(completions, stops, strict=True)
        ]
        for answer in answers:
            policy.record(trajectory, prompt, answer.completion, answer.message)
        shown = [await _logprobs(policy, answer) if asked.logprobs else None for answer in answers]
    return _Answered(prompt, answers, shown)


def _asked(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> _Asked:
    model = policy.refuse_other_models(body.text("model"))
    ours = policy.served.sampling if trajectory is None else trajectory.sampling
    settings = drawn(body, ours, model, fixed=trajectory is not None, lengths=("max_completion_tokens", "max_tokens"))
    body.refuse("top_logprobs", "the engines return log-probabilities of sampled tokens only", harmless=(0,))
    body.refuse("response_format", "structured output is not available", harmless=({"type": "text"},))
    body.refuse("modalities", "answers are text", harmless=(["text"],))
    body.ignore(*BOOKKEEPING)
    asked = _Asked(
        model=model,
        history=History(messages_of(body.objects("messages")), _tools(body), _arguments(body)),
        drawn=settings,
        n=body.integer("n", 1, least=1, most=MOST_ANSWERS) or 1,
        stream=body.boolean("stream"),
        usage_in_stream=bool(body.mapping("stream_options").get("include_usage")),
        logprobs=body.boolean("logprobs"),
        token_ids=body.boolean("return_token_ids"),
    )
    body.finish()
    return asked


def _tools(body: Fields) -> tuple[Json, ...]:
    choice = body.any("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError("tool_choice has to be auto or none: a tool call cannot be forced", param="tool_choice")
    given = tools_of(body.objects("tools"))
    return given if choice == "auto" else ()


def _arguments(body: Fields) -> Json:
    given = body.mapping("chat_template_kwargs")
    if taken := [name for name in RESERVED if name in given]:
        raise RequestError(f"chat_template_kwargs must not hold {', '.join(taken)}", param="chat_template_kwargs")
    return given


async def _logprobs(policy: Policy, answer: SampledMessage) -> Json:
    """Log-probabilities of the tokens, in nats, each with its text."""
    ids, values = answer.completion.token_ids, answer.completion.logprobs
    texts = await policy.decoded(ids)
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, values, strict=True)
    ]
    return {"content": content, "refusal": None}


def _whole(asked: _Asked, found: _Answered) -> Json:
    choices: list[dict[str, Any]] = []
    for index, (answer, logprobs) in enumerate(zip(found.messages, found.logprobs, strict=True)):
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None if answer.calls else answer.text}
        if answer.calls:
            message["tool_calls"] = _calls(answer)
        choices.append({"index": index, "message": message, "finish_reason": _finish(answer), "logprobs": logprobs})
        if asked.token_ids:
            choices[-1] |= tokens_of(answer)
    body = _head(asked, "chat.completion") | {"choices": choices, "usage": usage(found.prompt, found.messages)}
    return body | ({"prompt_token_ids": list(found.prompt.ids)} if asked.token_ids else {})


async def _events(asked: _Asked, policy: Policy, trajectory: PlayedTrajectory | None) -> Events:
    """Events of a stream: text as it is sampled; calls, log-probabilities and token ids when an answer is complete."""
    live = LiveAnswers(policy, asked.stops, tools=bool(asked.history.tools))
    answering = asyncio.ensure_future(_answered(asked, policy, trajectory, live))
    head, begun = _head(asked, "chat.completion.chunk"), set[int]()

    def event(index: int, delta: dict[str, Any], finish: str | None = None, **more: object) -> Event:
        role = {} if index in begun else {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": list(live.prompt.ids)} if asked.token_ids and not begun else {}
        begun.add(index)
        choice = {"index": index, "delta": role | delta, "finish_reason": finish, "logprobs": None, **more}
        return Event({**head, "choices": [choice], **ids})

    async with aclosing(live.pieces(answering, lambda found: [each.text for each in found.messages])) as pieces:
        async for index, piece in pieces:
            yield event(index, {"content": piece})
    found = answering.result()
    for index, (answer, logprobs) in enumerate(zip(found.messages, found.logprobs, strict=True)):
        if answer.calls:
            yield event(index, {"tool_calls": [{"index": place, **call} for place, call in enumerate(_calls(answer))]})
        yield event(index, {}, _finish(answer), logprobs=logprobs, **(tokens_of(answer) if asked.token_ids else {}))
    if asked.usage_in_stream:
        yield Event({**head, "choices": [], "usage": usage(found.prompt, found.messages)})


def _head(asked: _Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": now(), "model": asked.model}


def _calls(answer: SampledMessage) -> list[Json]:
    return [
        {
            "id": number,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in answer.calls
    ]


def _finish(answer: SampledMessage) -> str:
    reason = answer.completion.stop_reason
    return "tool_calls" if answer.calls and reason == "stop" else reason


def tokens_of(answer: SampledMessage) -> dict[str, Any]:
    """Fields that `return_token_ids` adds to each choice."""
    return {
        "token_ids": list(answer.completion.token_ids),
        "weight_versions": list(answer.completion.weight_versions),
    }


def usage(prompt: Prompt, answers: Sequence[SampledMessage]) -> Json:
    """Token counts of prompt and answers; the prompt is counted once."""
    drawn = sum(len(answer.completion.token_ids) for answer in answers)
    return {
        "prompt_tokens": len(prompt.ids),
        "completion_tokens": drawn,
        "total_tokens": len(prompt.ids) + drawn,
    }
