"""Bodies with something odd at any place: a service answers or refuses each with a reason, and never fails."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from starlette.applications import Starlette

from skyrl.envs.services.retriever import SearchIndex, retriever_app
from skyrl.envs.services.reward_service import reward_app

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**30, 1e308, float("nan"), "", "x", "\ud800", "\x00", "é" * 300, [], [1], [[]], {},
    {"x": 1}, {"": None}, "a" * 10_001, [None] * 300, json.loads("[" * 500 + "]" * 500),
)  # fmt: skip
QUESTION = {"query": "Rome", "queries": ["Tiber", "France"], "topk": 2, "return_scores": True}
CHATS = {"chats": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]}
COUNTS = [300, pytest.param(30_000, marks=pytest.mark.long)]


class Scorer:
    """Stands in for a reward model: it scores whatever has the form of a chat."""

    def scores(self, chats: list[list[dict[str, Any]]], gone: object) -> list[float]:
        return [float(sum(len(message["content"]) for message in chat)) for chat in chats]


async def answer(app: Starlette, path: str, body: bytes) -> tuple[int, Any]:
    """Status and JSON of a POST, without a network. What the service raises is raised."""
    pieces = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        piece = next(pieces, None)
        return piece if piece else await asyncio.Event().wait()  # the client stays

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def changed(body: Any, chance: random.Random) -> bytes:
    """The body with an odd value at one place of it, and now and then with a byte changed or the end cut off."""
    tree = json.loads(json.dumps(body))
    slots = [(tree, key) for key in tree]
    for holder, key in slots:
        inner = holder[key]
        if isinstance(inner, dict | list):
            slots += [(inner, inner_key) for inner_key in (inner if isinstance(inner, dict) else range(len(inner)))]
    holder, key = chance.choice(slots)
    holder[key] = chance.choice(ODD)
    text = bytearray(json.dumps(tree).encode())
    if chance.random() < 0.2:
        text[chance.randrange(len(text))] = chance.randrange(256)
    return bytes(text[: chance.randrange(len(text))] if chance.random() < 0.1 else text)


@pytest.mark.parametrize("count", COUNTS)
async def test_a_retriever_answers_or_refuses_every_body(count: int) -> None:
    app = retriever_app(SearchIndex([{"id": "a", "contents": "Rome on the Tiber"}]))
    assert await statuses(app, "/retrieve", QUESTION, "result", count) == {200, 400}


@pytest.mark.parametrize("count", COUNTS)
async def test_a_reward_service_answers_or_refuses_every_body(count: int) -> None:
    app = reward_app(Scorer(), "nano")  # type: ignore[arg-type]  # it only scores
    assert await statuses(app, "/score", CHATS, "scores", count) == {200, 400}


async def statuses(app: Starlette, path: str, body: Any, result: str, count: int) -> set[int]:
    """The statuses of all answers, each of which has a result or a reason."""
    chance, codes = random.Random(1), set()
    for _ in range(count):
        status, reply = await answer(app, path, changed(body, chance))
        assert isinstance(reply[result], list) if status == 200 else reply["error"]
        codes.add(status)
    return codes
