"""OpenAI's `POST /v1/responses`: a text or items in, items out, complete or as typed events.

`previous_response_id` continues a stored response. The latest responses are stored, up to 64 MiB of text; `store =
false` leaves one out. `instructions` apply to one request only.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

from attrs import frozen

from skyrl.endpoint.conversations import History, Message
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.live import LiveAnswers, SampledMessages, sample_messages
from skyrl.endpoint.messages import SampledMessage, call_message, may_call_tools, text_of
from skyrl.endpoint.policy import Policy
from skyrl.endpoint.reply import Event, Events, Json, Reply, now
from skyrl.endpoint.request_sampling import RequestSampling
from skyrl.errors import RequestError

_BOOKKEEPING = (
    *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "include"),
    *("prompt_cache_retention", "reasoning", "max_tool_calls"),
)
"""Bookkeeping fields of OpenAI's services, which are accepted and have no effect here."""


_MakesEvent = Callable[..., Event]
"""Makes the next event of a stream, given its type and its fields."""


@frozen(kw_only=True)
class _ResponsesRequest:
    """A parsed request."""

    number: str
    """Id of the response."""

    history: History
    carried: tuple[Message, ...]
    """The messages that a later response continues: all but the instructions."""

    settings: RequestSampling
    stream: bool
    store: bool
    echoed: Json
    """Fields of the request that are repeated in the response."""


async def responses(body: Fields, policy: Policy) -> Reply:
    """Answer one request. Raises `RequestError`."""
    request = _parse_request(body, policy)
    if request.stream:
        return Reply(events=_events(request, policy))
    result = await sample_messages(request.history, request.settings, 1, policy)
    return Reply(_response(request, result, _items(result.messages[0]), policy))


def _response(request: _ResponsesRequest, result: SampledMessages, output: Sequence[Json], policy: Policy) -> Json:
    """The whole response, which is stored if the request did not refuse that."""
    (answer,) = result.messages
    sampled = len(answer.completion.token_ids)
    is_cut = answer.completion.stop_reason == "length"
    usage = {
        "input_tokens": len(result.prompt.ids),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(result.prompt.ids) + sampled,
    }
    details = {"reason": "max_output_tokens"} if is_cut else None
    head = _head(request, "incomplete" if is_cut else "completed")
    response = head | {"output": output, "incomplete_details": details, "usage": usage}
    if request.store:
        policy.stored.keep(response, History((*request.carried, answer.message)))
    return response


def _parse_request(body: Fields, policy: Policy) -> _ResponsesRequest:
    settings = policy.settings(body, lengths=("max_output_tokens",))
    _refuse(body)
    instructions, before = body.text("instructions"), body.text("previous_response_id")
    earlier = policy.stored.history(before).messages if before is not None else ()
    carried = (*earlier, *_messages(body.value("input")))
    first: tuple[Message, ...] = () if instructions is None else ({"role": "system", "content": instructions},)
    choice = body.value("tool_choice", "auto")
    calls_tools = may_call_tools(choice)
    items = body.objects("tools")
    tools = _tools(items)
    echoed = {"instructions": instructions, "previous_response_id": before, "tools": items, "tool_choice": choice}
    request = _ResponsesRequest(
        number=f"resp_{secrets.token_hex(12)}",
        history=History((*first, *carried), tools if calls_tools else ()),
        carried=carried,
        settings=settings,
        stream=body.boolean("stream"),
        store=body.boolean("store", True),
        echoed=echoed | {"metadata": body.mapping("metadata")},
    )
    body.finish()
    return request


def _refuse(body: Fields) -> None:
    """Refuse fields that would change the answer and are not implemented."""
    body.refuse("top_logprobs", "the engines return log-probabilities of sampled tokens only", harmless=(0,))
    body.refuse("background", "a response is sampled while its request waits", harmless=(False,))
    body.refuse("truncation", "a prompt that is too long is refused", harmless=("disabled",))
    body.refuse("conversation", "conversations continue by previous_response_id")
    body.refuse("prompt", "there are no stored prompts")
    text = dict(body.mapping("text"))
    if text.pop("format", {"type": "text"}) != {"type": "text"}:
        raise RequestError(
            "text.format has to be text: structured output is not available", param="text", code="unsupported_value"
        )
    body.ignore(*_BOOKKEEPING, "stream_options")


def _head(request: _ResponsesRequest, status: str) -> dict[str, Any]:
    settings = request.settings.sampling
    return {
        "id": request.number,
        "object": "response",
        "created_at": now(),
        "status": status,
        "model": request.settings.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": settings.max_generate_length,
        "temperature": 0.0 if settings.greedy else settings.temperature,
        "top_p": settings.top_p,
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None,
        **request.echoed,
    }


def _messages(items: object) -> tuple[Message, ...]:
    """The messages of an input. A call is added to the message before it if that is the assistant's. Raises
    `RequestError`.
    """
    if isinstance(items, str):
        return ({"role": "user", "content": items},)
    if not isinstance(items, list) or not items or not all(isinstance(item, Mapping) for item in items):
        raise RequestError("input has to be a string, or a list of items that is not empty", param="input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    return tuple(messages)


def _add(messages: list[dict[str, Any]], item: Json, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("system", "developer", "user", "assistant"):
                raise RequestError(f"{where}.role has to be system, developer, user or assistant", param=where)
            role = "system" if role == "developer" else role
            messages.append({"role": role, "content": text_of(item.get("content"), where)})
        case "function_call":
            if not isinstance(item.get("name"), str):
                raise RequestError(f"{where} is a call without a name", param=where)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = call_message(str(item.get("call_id", "")), item["name"], item.get("arguments") or {})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = text_of(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text})
        case other:
            raise RequestError(
                f"{where} is of type {str(other)[:60]!r}: message, function_call and function_call_output are read",
                param=where,
                code="unsupported_value",
            )


def _tools(tools: Sequence[Json]) -> tuple[Json, ...]:
    """Tools of this protocol as tools for a chat template. Raises `RequestError` for tools that OpenAI hosts."""
    for tool in tools:
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise RequestError("tools has to hold functions with a name: no other tool runs here", param="tools")
    kept = ("name", "description", "parameters")
    return tuple(
        {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}
        for tool in tools
    )


def _items(answer: SampledMessage, number: str | None = None) -> list[dict[str, Any]]:
    """An answer as items: its calls, preceded by its text (item id `number`) if it has text or no calls."""
    part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
    status = "incomplete" if answer.completion.stop_reason == "length" else "completed"
    head = {"type": "message", "id": number or f"msg_{secrets.token_hex(12)}", "role": "assistant", "status": status}
    items: list[dict[str, Any]] = [{**head, "content": [part]}] if answer.text or not answer.calls else []
    for call_id, call in answer.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call_id, "name": call.name}
        items.append({**item, "arguments": arguments, "status": "completed"})
    return items


async def _events(request: _ResponsesRequest, policy: Policy) -> Events:
    """Events of a stream: text as it is sampled, and calls when the answer is complete."""
    live = LiveAnswers(policy, request.settings.sampling.stop or (), tools=bool(request.history.tools))
    sampling = sample_messages(request.history, request.settings, 1, policy, live)
    answering = asyncio.ensure_future(sampling)
    numbers, number, started = count(), f"msg_{secrets.token_hex(12)}", False

    def event(kind: str, **data: object) -> Event:
        return Event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    where = {"item_id": number, "output_index": 0, "content_index": 0}
    async with aclosing(live.pieces(answering, lambda result: [message.text for message in result.messages])) as pieces:
        async for _, piece in pieces:
            if not started:
                for opening in (*_begin(event, request), *_open_text(event, 0, number)):
                    yield opening
                started = True
            yield event("response.output_text.delta", **where, delta=piece, logprobs=[])
    result = answering.result()
    items = _items(result.messages[0], number)
    response = _response(request, result, items, policy)
    if not started:
        for opening in _begin(event, request):
            yield opening
    for index, item in enumerate(items):
        for closing in _closing(event, index, item, started=started and index == 0):
            yield closing
    yield event(f"response.{response['status']}", response=response)


def _begin(event: _MakesEvent, request: _ResponsesRequest) -> list[Event]:
    head = _head(request, "in_progress")
    return [event("response.created", response=head), event("response.in_progress", response=head)]


def _open_text(event: _MakesEvent, index: int, number: str) -> list[Event]:
    item = {"type": "message", "id": number, "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    where = {"item_id": number, "output_index": index, "content_index": 0}
    return [
        event("response.output_item.added", output_index=index, item=item),
        event("response.content_part.added", **where, part=part),
    ]


def _closing(event: _MakesEvent, index: int, item: Mapping[str, Any], *, started: bool) -> list[Event]:
    """The events that end an item, preceded by those that begin it unless it has `started`."""
    events: list[Event] = []
    if item["type"] == "message":
        (part,), where = item["content"], {"item_id": item["id"], "output_index": index, "content_index": 0}
        events += [] if started else _open_text(event, index, item["id"])
        events.append(event("response.output_text.done", **where, text=part["text"], logprobs=[]))
        events.append(event("response.content_part.done", **where, part=part))
    else:
        empty, arguments = {**item, "arguments": "", "status": "in_progress"}, item["arguments"]
        where = {"item_id": item["id"], "output_index": index}
        events.append(event("response.output_item.added", output_index=index, item=empty))
        events.append(event("response.function_call_arguments.delta", **where, delta=arguments))
        events.append(event("response.function_call_arguments.done", **where, name=item["name"], arguments=arguments))
    return [*events, event("response.output_item.done", output_index=index, item=item)]
