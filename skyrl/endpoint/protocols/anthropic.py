"""Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`: content blocks in, content blocks out."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from skyrl.endpoint.conversations import History, Message
from skyrl.endpoint.fields import Fields
from skyrl.endpoint.live import LiveAnswers, sample_messages
from skyrl.endpoint.messages import SampledMessage, call_message, may_call_tools, text_of
from skyrl.endpoint.policy import Policy, PromptTokens
from skyrl.endpoint.reply import Event, Events, Json, Reply
from skyrl.endpoint.request_sampling import RequestSampling
from skyrl.errors import RequestError

_BOOKKEEPING = ("metadata", "service_tier", "container", "context_management", "mcp_servers", "betas")


async def messages(body: Fields, policy: Policy) -> Reply:
    """Answer one request. Raises `RequestError`."""
    settings = policy.settings(body, lengths=("max_tokens",), stops="stop_sequences")
    body.refuse("thinking", "the model's template decides how it thinks", harmless=({"type": "disabled"},))
    body.ignore(*_BOOKKEEPING)
    history, stream = _history(body), body.boolean("stream")
    body.finish()
    if stream:
        return Reply(events=_events(history, settings, policy))
    result = await sample_messages(history, settings, 1, policy)
    (answer,) = result.messages
    text: list[Json] = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    head = _head(settings.model, result.prompt, len(answer.completion.token_ids))
    return Reply({**head, "content": [*text, *_tool_uses(answer)], **_stop_fields(answer)})


async def count_tokens(body: Fields, policy: Policy) -> Reply:
    """Count the prompt tokens of a request. Raises `RequestError`."""
    policy.refuse_other_models(body.text("model"))
    history = _history(body)
    body.ignore(*_BOOKKEEPING, "thinking")
    body.finish()
    with policy.of_clients.admitted(1):
        prompt = await policy.conversation(history)
    return Reply({"input_tokens": len(prompt.ids)})


def _history(body: Fields) -> History:
    system = text_of(body.value("system"), "system")
    messages = [message for item in body.objects("messages") for message in _messages(item)]
    if not messages:
        raise RequestError("messages has to hold a message", param="messages")
    first = [{"role": "system", "content": system}] if system else []
    calls_tools = may_call_tools(body.mapping("tool_choice").get("type", "auto"))
    tools = tuple(_tool(item) for item in body.objects("tools"))
    return History((*first, *messages), tools if calls_tools else ())


def _tool(item: Json) -> Json:
    if not isinstance(item.get("name"), str) or item.get("type", "custom") != "custom":
        raise RequestError("tools has to hold tools of your own, with a name", param="tools")
    function = {"name": item["name"], "description": item.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": item.get("input_schema", {})}}


def _messages(item: Json) -> list[Message]:
    """One Anthropic message as messages of a chat template: each tool result becomes a separate message."""
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant"):
        raise RequestError("a message has the role user or assistant", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError("the content of a message is a string or a list of blocks", param="messages")
    results = [_tool_result(block) for block in content if block.get("type") == "tool_result"]
    calls = [_tool_use(block) for block in content if block.get("type") == "tool_use"]
    rest = [block for block in content if block.get("type") not in ("tool_result", "tool_use")]
    message: dict[str, Any] = {"role": role, "content": text_of(rest, "messages")}
    if calls:
        message["tool_calls"] = calls
    return [*results, *([message] if rest or calls else [])]


def _tool_result(block: Json) -> Message:
    text = text_of(block.get("content"), "tool_result")
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text}


def _tool_use(block: Json) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise RequestError("a tool_use block has a name", param="messages")
    return call_message(str(block.get("id", "")), block["name"], block.get("input") or {})


def _head(model: str, prompt: PromptTokens, sampled: int) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(prompt.ids), "output_tokens": sampled},
    }


def _stop_fields(answer: SampledMessage) -> Json:
    if answer.completion.stop_reason == "length":
        reason = "max_tokens"
    elif answer.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if answer.ended_by else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.ended_by}


def _tool_uses(answer: SampledMessage) -> list[Json]:
    return [
        {"type": "tool_use", "id": id_, "name": call.name, "input": dict(call.arguments)} for id_, call in answer.calls
    ]


async def _events(history: History, settings: RequestSampling, policy: Policy) -> Events:
    """Events of a stream: text as it is sampled, and tool uses when the answer is complete."""
    live = LiveAnswers(policy, settings.sampling.stop or (), tools=bool(history.tools))
    answering = asyncio.ensure_future(sample_messages(history, settings, 1, policy, live))
    blocks = 0
    async with aclosing(live.pieces(answering, lambda result: [message.text for message in result.messages])) as pieces:
        async for _, piece in pieces:
            if not blocks:
                yield _event("message_start", message=_head(settings.model, live.prompt, 0))
                yield _block_start(0, {"type": "text", "text": ""})
                blocks = 1
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
    (answer,) = answering.result().messages
    if not blocks:
        yield _event("message_start", message=_head(settings.model, live.prompt, 0))
    else:
        yield _event("content_block_stop", index=0)
    for index, use in enumerate(_tool_uses(answer), start=blocks):
        yield _block_start(index, {**use, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": json.dumps(use["input"])}
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    usage = {"output_tokens": len(answer.completion.token_ids)}
    yield _event("message_delta", delta=_stop_fields(answer), usage=usage)
    yield _event("message_stop")


def _block_start(index: int, block: Json) -> Event:
    return _event("content_block_start", index=index, content_block=block)


def _event(name: str, **data: object) -> Event:
    return Event({"type": name, **data}, name)
