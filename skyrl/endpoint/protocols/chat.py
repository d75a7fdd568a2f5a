"""OpenAI's `POST /v1/chat/completions`: messages and tools in, `n` messages out, complete or as a stream.

Beyond OpenAI's fields, as in vLLM: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`,
`chat_template_kwargs`, and `return_token_ids`, which adds `prompt_token_ids` to the answer and `token_ids` to each
choice; `weight_versions` gives the version of the weights that sampled each token.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any

from attrs import evolve, frozen

from skyrl.endpoint.conversations import History
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.live import LiveAnswers, sample_messages
from skyrl.endpoint.messages import SampledMessage, may_call_tools, messages_of, tools_of
from skyrl.endpoint.policy import MOST_ANSWERS, Policy, PromptTokens
from skyrl.endpoint.reply import Event, Events, Json, Reply, now
from skyrl.endpoint.request_sampling import RequestSampling
from skyrl.errors import RequestError
from skyrl.inference.engine import MOST_TOP_LOGPROBS

BOOKKEEPING = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
    *("prompt_cache_retention", "verbosity", "reasoning_effort"),
)
"""Bookkeeping fields of OpenAI's services, which are accepted and have no effect here."""

RESERVED = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template")


@frozen(kw_only=True)
class _ChatRequest:
    """A parsed request."""

    history: History
    settings: RequestSampling
    n: int
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    token_ids: bool


async def chat(body: Fields, policy: Policy) -> Reply:
    """Answer one request. Raises `RequestError`."""
    request = _parse_request(body, policy)
    if request.stream:
        return Reply(events=_events(request, policy), ends_with_done=True)
    result = await sample_messages(request.history, request.settings, request.n, policy)
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(result.messages):
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None if answer.calls else answer.text}
        if answer.calls:
            message["tool_calls"] = _calls(answer)
        logprobs = await _logprobs(policy, answer) if request.logprobs else None
        choices.append({"index": index, "message": message, "finish_reason": _finish(answer), "logprobs": logprobs})
        if request.token_ids:
            choices[-1] |= tokens_of(answer)
    response = _head(request, "chat.completion") | {"choices": choices, "usage": usage(result.prompt, result.messages)}
    return Reply(response | ({"prompt_token_ids": list(result.prompt.ids)} if request.token_ids else {}))


def _parse_request(body: Fields, policy: Policy) -> _ChatRequest:
    settings = policy.settings(body, lengths=("max_completion_tokens", "max_tokens"))
    if not policy.served.scores_prompts:
        body.refuse("top_logprobs", "the engines return log-probabilities of sampled tokens only", harmless=(0,))
    top = body.integer("top_logprobs", 0, least=0, most=MOST_TOP_LOGPROBS)
    body.refuse("response_format", "structured output is not available", harmless=({"type": "text"},))
    body.refuse("modalities", "answers are text", harmless=(["text"],))
    body.ignore(*BOOKKEEPING)
    messages = messages_of(body.objects("messages"))
    calls_tools = may_call_tools(body.value("tool_choice", "auto"))
    tools = tools_of(body.objects("tools"))
    arguments = body.mapping("chat_template_kwargs")
    if reserved := [name for name in RESERVED if name in arguments]:
        raise RequestError(f"chat_template_kwargs must not hold {', '.join(reserved)}", param="chat_template_kwargs")
    request = _ChatRequest(
        history=History(messages, tools if calls_tools else (), arguments),
        settings=evolve(settings, top_logprobs=top),
        n=body.integer("n", 1, least=1, most=MOST_ANSWERS),
        stream=body.boolean("stream"),
        usage_in_stream=bool(body.mapping("stream_options").get("include_usage")),
        logprobs=body.boolean("logprobs"),
        token_ids=body.boolean("return_token_ids"),
    )
    body.finish()
    return request


async def _logprobs(policy: Policy, answer: SampledMessage) -> Json:
    """Log-probabilities of the tokens and of the likeliest ones in their places, in nats, each with its text."""

    def entries(texts: Iterable[str], values: Iterable[float]) -> list[dict[str, Any]]:
        pairs = zip(texts, values, strict=True)
        return [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in pairs]

    drawn, top = answer.completion, answer.completion.top_logprobs
    content = [entry | {"top_logprobs": []} for entry in entries(await policy.decoded(drawn.token_ids), drawn.logprobs)]
    if top is not None:
        width, others = top.token_ids.shape[1], await policy.decoded(top.token_ids.ravel().tolist())
        likeliest = entries(others, top.logprobs.ravel().tolist())
        for index, item in enumerate(content):
            item["top_logprobs"] = likeliest[index * width : (index + 1) * width]
    return {"content": content, "refusal": None}


async def _events(request: _ChatRequest, policy: Policy) -> Events:
    """Events of a stream: text as it is sampled; calls, log-probabilities and token ids when an answer is complete."""
    live = LiveAnswers(policy, request.settings.sampling.stop or (), tools=bool(request.history.tools))
    sampling = sample_messages(request.history, request.settings, request.n, policy, live)
    answering = asyncio.ensure_future(sampling)
    head, started = _head(request, "chat.completion.chunk"), set[int]()

    def event(index: int, delta: dict[str, Any], finish: str | None = None, **more: object) -> Event:
        role = {} if index in started else {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": list(live.prompt.ids)} if request.token_ids and not started else {}
        started.add(index)
        choice = {"index": index, "delta": role | delta, "finish_reason": finish, "logprobs": None, **more}
        return Event({**head, "choices": [choice], **ids})

    async with aclosing(live.pieces(answering, lambda result: [message.text for message in result.messages])) as pieces:
        async for index, piece in pieces:
            yield event(index, {"content": piece})
    result = answering.result()
    for index, answer in enumerate(result.messages):
        if answer.calls:
            yield event(
                index, {"tool_calls": [{"index": call_index, **call} for call_index, call in enumerate(_calls(answer))]}
            )
        logprobs = await _logprobs(policy, answer) if request.logprobs else None
        yield event(index, {}, _finish(answer), logprobs=logprobs, **(tokens_of(answer) if request.token_ids else {}))
    if request.usage_in_stream:
        yield Event({**head, "choices": [], "usage": usage(result.prompt, result.messages)})


def _head(request: _ChatRequest, kind: str) -> dict[str, Any]:
    model = request.settings.model
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": now(), "model": model}


def _calls(answer: SampledMessage) -> list[Json]:
    return [
        {
            "id": id_,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for id_, call in answer.calls
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


def usage(prompt: PromptTokens, answers: Sequence[SampledMessage]) -> Json:
    """Token counts of prompt and answers; the prompt is counted once."""
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {
        "prompt_tokens": len(prompt.ids),
        "completion_tokens": sampled,
        "total_tokens": len(prompt.ids) + sampled,
    }
