"""Agents written with OpenAI's client, as their authors would write them. Nothing of skyrl is imported here."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

ADD: Any = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)


async def talks(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    """Three turns of one conversation, with a tool."""
    messages = list(task["messages"])
    async with client(base_url, api_key) as openai_client:
        for _ in range(3):
            answer = await openai_client.chat.completions.create(model=model, messages=messages, tools=[ADD])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
    return str(message.content)


async def forgets(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Two turns, then the history is replaced by a summary."""
    messages = list(task["messages"])
    async with client(base_url, api_key) as openai_client:
        for content in ("go on", None):
            answer = await openai_client.chat.completions.create(model="tiny", messages=messages)
            messages += [answer.choices[0].message]
            messages += [{"role": "user", "content": content}] if content else []
        await openai_client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "summary"}])
    return 0.5


async def splits(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """One turn, continued twice at the same time."""
    messages = list(task["messages"])
    async with client(base_url, api_key) as openai_client:
        first = await openai_client.chat.completions.create(model="tiny", messages=messages)
        messages.append(first.choices[0].message)
        await asyncio.gather(
            *(
                openai_client.chat.completions.create(
                    model="tiny", messages=[*messages, {"role": "user", "content": content}]
                )
                for content in ("left", "right")
            )
        )
    return 1.0


async def wants_heat(task: dict[str, Any], base_url: str, api_key: str) -> float:
    async with client(base_url, api_key) as openai_client:
        await openai_client.chat.completions.create(
            model="tiny", messages=task["messages"], temperature=0.1, max_tokens=2
        )
    return 1.0


async def never_stops(task: dict[str, Any], base_url: str, api_key: str) -> float:
    messages = list(task["messages"])
    async with client(base_url, api_key) as openai_client:
        while True:
            answer = await openai_client.chat.completions.create(model="tiny", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]


async def asks_nothing(task: dict[str, Any]) -> float:
    return 1.0


async def sleeps(task: dict[str, Any]) -> float:
    await asyncio.Event().wait()
    return 1.0


def says_no_number(task: dict[str, Any], base_url: str, api_key: str) -> str:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as openai_client:
        openai_client.chat.completions.create(model="tiny", messages=task["messages"])
    return "a lot"


def wants_more(task: dict[str, Any], budget: int) -> float:
    return float(budget)


async def pays(task: dict[str, Any], base_url: str, api_key: str, pays: float = 0.25) -> float:
    """One question, and a reward that the configuration says."""
    async with client(base_url, api_key) as openai_client:
        await openai_client.chat.completions.create(model="tiny", messages=task["messages"])
    return pays
