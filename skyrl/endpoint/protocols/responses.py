"""OpenAI's `POST /v1/responses`: a text or items in, items out, complete or as typed events.

`previous_response_id` continues a stored response. The latest responses are stored, up to 64 MiB of text; `store =
false` leaves one out. `instructions` apply to one request only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from attrs import frozen

from skyrl.endpoint.conversations import History, Message
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.items import items_of, messages_of_items, tools_of_items
from skyrl.endpoint.live import LiveAnswers, SampledMessages, sample_messages
from skyrl.endpoint.messages import may_call_tools
from skyrl.endpoint.policy import Policy
from skyrl.endpoint.reply import Event, Events, Json, Reply, now
from skyrl.endpoint.request_sampling import RequestSampling
from skyrl.endpoint.trajectories import PlayedTrajectory
from skyrl.errors import RequestError

_BOOKKEEPING = (
    *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "include"),
    *("prompt_cache_retention", "reasoning", "max_tool_calls"),
)
"""Bookkeeping fields of OpenAI's services, which are accepted and have no effect here."""


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


async def responses(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> Reply:
    """Answer one request. Raises `RequestError`."""
    request = _parse_request(body, policy, trajectory)
    if request.stream:
        return Reply(events=_events(request, policy, trajectory))
    result = await sample_messages(request.history, request.settings, 1, policy, trajectory)
    return Reply(_response(request, result, items_of(result.messages[0]), policy, trajectory))


def _response(
    request: _ResponsesRequest,
    result: SampledMessages,
    output: Sequence[Json],
    policy: Policy,
    trajectory: PlayedTrajectory | None,
) -> Json:
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
        policy.stored_responses(trajectory).keep(response, History((*request.carried, answer.message)))
    return response


def _parse_request(body: Fields, policy: Policy, trajectory: PlayedTrajectory | None) -> _ResponsesRequest:
    settings = policy.settings(body, trajectory, lengths=("max_output_tokens",))
    _refuse(body)
    instructions, before = body.text("instructions"), body.text("previous_response_id")
    earlier = policy.stored_responses(trajectory).history(before).messages if before is not None else ()
    carried = (*earlier, *messages_of_items(body.value("input")))
    first: tuple[Message, ...] = () if instructions is None else ({"role": "system", "content": instructions},)
    choice = body.value("tool_choice", "auto")
    calls_tools = may_call_tools(choice)
    items = body.objects("tools")
    tools = tools_of_items(items)
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


class _Numbered:
    """Makes events with increasing sequence numbers."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, kind: str, **data: object) -> Event:
        number, self._next = self._next, self._next + 1
        return Event({"type": kind, "sequence_number": number, **data}, kind)


async def _events(request: _ResponsesRequest, policy: Policy, trajectory: PlayedTrajectory | None) -> Events:
    """Events of a stream: text as it is sampled, and calls when the answer is complete."""
    live = LiveAnswers(policy, request.settings.sampling.stop or (), tools=bool(request.history.tools))
    sampling = sample_messages(request.history, request.settings, 1, policy, trajectory, live)
    answering = asyncio.ensure_future(sampling)
    event, number, started = _Numbered(), f"msg_{secrets.token_hex(12)}", False
    where = {"item_id": number, "output_index": 0, "content_index": 0}
    async with aclosing(live.pieces(answering, lambda result: [message.text for message in result.messages])) as pieces:
        async for _, piece in pieces:
            if not started:
                for opening in (*_begin(event, request), *_open_text(event, 0, number)):
                    yield opening
                started = True
            yield event("response.output_text.delta", **where, delta=piece, logprobs=[])
    result = answering.result()
    items = items_of(result.messages[0], number)
    response = _response(request, result, items, policy, trajectory)
    if not started:
        for opening in _begin(event, request):
            yield opening
    for index, item in enumerate(items):
        for closing in _closing(event, index, item, started=started and index == 0):
            yield closing
    yield event(f"response.{response['status']}", response=response)


def _begin(event: _Numbered, request: _ResponsesRequest) -> list[Event]:
    head = _head(request, "in_progress")
    return [event("response.created", response=head), event("response.in_progress", response=head)]


def _open_text(event: _Numbered, index: int, number: str) -> list[Event]:
    item = {"type": "message", "id": number, "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    where = {"item_id": number, "output_index": index, "content_index": 0}
    return [
        event("response.output_item.added", output_index=index, item=item),
        event("response.content_part.added", **where, part=part),
    ]


def _closing(event: _Numbered, index: int, item: Mapping[str, Any], *, started: bool) -> list[Event]:
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
