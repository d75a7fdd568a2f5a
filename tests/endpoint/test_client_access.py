"""Who is answered, and what is refused before anything is sampled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from skyrl.config import SamplingParams
from skyrl.endpoint.client_access import TOKEN_VARIABLE, Address, ClientAccess
from skyrl.endpoint.http.server import Endpoint
from skyrl.endpoint.policy import ServedPolicy
from skyrl.errors import RunError, UserError
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.processes import service
from tests.endpoint.serving import Script, served

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class Gate:
    """An engine that answers when the test says so."""

    def __init__(self) -> None:
        self.open, self.asked, self.gone = asyncio.Event(), asyncio.Semaphore(0), asyncio.Event()
        self.script = Script(["x"] * 8)

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self.asked.release()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        return await self.script.generate(request)


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe", b"{", b"[]", b'{"messages": NaN}', b"[" * 100_000, b'"text"'],
    ids=["not UTF-8", "half", "a list", "NaN", "deep", "a string"],
)
async def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    script = Script([])
    async with served(script.generate, script.tokenizer) as server, httpx.AsyncClient(base_url=server.url) as http:
        answer = await http.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_half_of_a_surrogate_pair_is_refused() -> None:
    script = Script([])
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    async with served(script.generate, script.tokenizer) as server, httpx.AsyncClient(base_url=server.url) as http:
        answer = await http.post(CHAT, content=body, headers=JSON)
    assert (answer.status_code, script.requests) == (400, [])
    assert "lone surrogate" in answer.json()["error"]["message"]


async def test_a_body_of_ten_megabytes_is_refused() -> None:
    script = Script([])
    async with served(script.generate, script.tokenizer) as server, httpx.AsyncClient(base_url=server.url) as http:
        response = await http.post(CHAT, content=b"x" * 10_000_000, headers=JSON)
    assert response.status_code == 413


@pytest.mark.long
async def test_ten_thousand_headers_are_refused() -> None:
    script = Script([])
    headers = {f"x-{number}": "y" for number in range(10_000)}
    async with served(script.generate, script.tokenizer) as server, httpx.AsyncClient(base_url=server.url) as http:
        try:
            status = (await http.post(CHAT, json=HELLO, headers=headers)).status_code
        except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError):  # the connection was closed on them
            status = 431
    assert status in (400, 431)  # the parser's limit on bytes, or the endpoint's on their number
    assert script.requests == []


async def test_an_address_that_others_reach_needs_a_token() -> None:
    script = Script([])
    policy = ServedPolicy(names=("tiny",), sampling=SamplingParams(), max_model_len=64, most_samples=1)
    with pytest.raises(UserError, match=TOKEN_VARIABLE):
        Endpoint(policy, script.tokenizer, script.generate, Address(host="0.0.0.0"))


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "täglich".encode()}])
async def test_without_the_token_nothing_is_answered(headers: dict[str, Any]) -> None:
    script = Script(["x"])
    access = ClientAccess(token="secret-of-this-test")
    async with (
        served(script.generate, script.tokenizer, access=access) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        refused = await http.post(CHAT, json=HELLO, headers=headers)
        listed = await http.get("/v1/models", headers=headers)
        accepted = await http.post(CHAT, json=HELLO, headers={"authorization": "Bearer secret-of-this-test"})
    assert (refused.status_code, listed.status_code, accepted.status_code) == (401, 401, 200)


async def test_beyond_the_bound_a_client_is_sent_away_with_a_time_to_come_back() -> None:
    gate = Gate()
    async with (
        served(gate.generate, gate.script.tokenizer, most_samples=2) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        waiting = asyncio.create_task(http.post(CHAT, json={**HELLO, "n": 2}))
        await gate.asked.acquire()
        refused = await http.post(CHAT, json=HELLO)
        gate.open.set()
        answered = await waiting
        retry = await http.post(CHAT, json=HELLO)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert (answered.status_code, retry.status_code) == (200, 200)


async def test_of_many_clients_at_once_as_many_are_answered_as_the_bound_allows() -> None:
    gate = Gate()
    async with (
        served(gate.generate, gate.script.tokenizer, most_samples=8) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http,
    ):
        tasks = [asyncio.create_task(http.post(CHAT, json=HELLO)) for _ in range(60)]
        refused = 0
        for answer in asyncio.as_completed(tasks):
            refused += (await answer).status_code == 429
            if refused == 52:  # the others wait for the engine
                gate.open.set()
        statuses = [task.result().status_code for task in tasks]
    assert (statuses.count(200), statuses.count(429)) == (8, 52)


async def test_a_client_that_hangs_up_leaves_the_engine_free() -> None:
    gate = Gate()
    async with served(gate.generate, gate.script.tokenizer, most_samples=1) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            waiting = asyncio.create_task(http.post(CHAT, json=HELLO))
            await gate.asked.acquire()
            waiting.cancel()
            await asyncio.wait([waiting])
        await asyncio.wait_for(gate.gone.wait(), 60)


async def test_an_engine_that_fails_is_named_and_may_be_tried_again() -> None:
    async def fails(request: GenerationRequest) -> tuple[Completion, ...]:
        raise RunError("engine 0 has ended")

    script = Script([])
    async with served(fails, script.tokenizer) as server, httpx.AsyncClient(base_url=server.url) as http:
        answer = await http.post(CHAT, json=HELLO)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "engine 0 has ended" in answer.json()["error"]["message"]


async def test_a_request_that_waits_when_the_run_ends_is_answered() -> None:
    gate = Gate()
    async with httpx.AsyncClient(timeout=60) as http:
        async with served(gate.generate, gate.script.tokenizer) as server:
            waiting = asyncio.create_task(http.post(server.url + CHAT, json=HELLO))
            await gate.asked.acquire()
        answer = await waiting
    assert answer.status_code == 503
    assert "have ended" in json.dumps(answer.json())


def test_an_idle_connection_outlives_that_of_a_client() -> None:
    """Otherwise a client sends a request while the server closes, and sees a broken connection."""
    expiry = httpx.Limits().keepalive_expiry
    assert expiry is not None
    assert expiry < service.server_of(Starlette()).config.timeout_keep_alive < service.HEADER_SECONDS


async def test_half_of_a_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEADER_SECONDS", 0.05)
    script = Script([])
    async with served(script.generate, script.tokenizer) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
