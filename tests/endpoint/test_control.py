"""Engines behind the endpoint that a training run pauses and gives weights; `tests/inference/test_engine_contract.py`
has them keep every promise of an engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve, frozen

from skyrl.config import InferenceEngineConfig, SamplingParams, SkyRLLoraConfig
from skyrl.endpoint.client_access import ClientAccess
from skyrl.endpoint.control import EngineControl
from skyrl.endpoint.trajectories import PlayedTrajectory
from skyrl.inference.engine import SampleKey
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.torch.engine import TorchEngine
from skyrl.weight_receiver.incoming_weights import (
    BroadcastWeights,
    FolderWeights,
    acknowledgement,
    as_plain,
    weight_info,
)
from skyrl.weight_receiver.transfer_group import TransferGroup
from skyrl.weight_sync.senders import FolderSender
from tests.endpoint.serving import TOOLS_CHATML, Script, served
from tests.inference.nano import nano_model
from tests.rollout.chats import chat_tokenizer

GENERATE = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "temperature": 0}}


@frozen
class Controlled:
    """An endpoint whose engines can be controlled, and a client of it."""

    http: httpx.AsyncClient
    engine: TorchEngine
    endpoint: Any

    async def post(self, path: str, body: Any = None, **query: str) -> httpx.Response:
        return await self.http.post(path, json=body or {}, params=query)

    async def call(self, method: str, *arguments: Any) -> httpx.Response:
        return await self.post("/collective_rpc", {"method": method, "args": list(arguments)})


@asynccontextmanager
async def controlled(*, engines: int = 1, access: ClientAccess | None = None) -> AsyncIterator[Controlled]:
    tokenizer, config = chat_tokenizer(TOOLS_CHATML), InferenceEngineConfig(backend="torch", max_num_seqs=8)
    torch_engines = [TorchEngine(nano_model(), tokenizer, max_num_seqs=8) for _ in range(engines)]
    client = InferenceEngineClient(torch_engines, tokenizer, "a/model", SkyRLLoraConfig(), config)
    control = EngineControl(client, workers=1)
    async with (
        served(control.generate, tokenizer, access=access, control=control) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        yield Controlled(http, torch_engines[0], server.endpoint)
    await client.close()


def other_weights(path: Path) -> FolderWeights:
    """Weights of the same model, drawn with another seed."""
    weights = nano_model(seed=1).state_dict()
    FolderSender(path=str(path), dtype="float32")(iter(weights.items()))
    return FolderWeights(path=str(path), weights=tuple(weight_info(name, tensor) for name, tensor in weights.items()))


def said(answer: httpx.Response) -> str:
    message: str = answer.json()["error"]["message"]
    return message


async def test_engines_that_nobody_may_control_have_no_such_routes() -> None:
    script = Script([])
    async with served(script.generate, script.tokenizer) as server, httpx.AsyncClient(base_url=server.url) as http:
        answers = [await http.post(path) for path in ("/pause", "/collective_rpc", "/update_weight_version")]
    assert [answer.status_code for answer in answers] == [404] * 3


async def test_only_a_client_with_the_token_controls_the_engines_and_no_agent() -> None:
    async with controlled(access=ClientAccess(token="secret-of-this-test")) as server:
        sample = SampleKey(run_seed=0, weight_version=0, prompt_id="a task", sample_index=0)
        played = PlayedTrajectory(sample, SamplingParams(), most_requests=1)
        with server.endpoint.trajectories.playing(played) as trajectory:
            keys = {"none": {}, "wrong": {"x-api-key": "no"}, "agent": {"x-api-key": trajectory.key}}
            refused = {
                name: await server.http.post("/pause?mode=wait", headers=headers) for name, headers in keys.items()
            }
        bearer = {"authorization": "Bearer secret-of-this-test"}
        state = await server.http.get("/is_paused", headers=bearer)
        response = await server.http.post("/pause?mode=wait", headers=bearer)
    assert {name: answer.status_code for name, answer in refused.items()} == {"none": 401, "wrong": 401, "agent": 403}
    assert (state.json(), response.status_code) == ({"is_paused": False}, 200)


async def test_a_page_of_a_browser_on_this_machine_does_not_control_the_engines() -> None:
    async with controlled() as server:
        page = {"origin": "https://example.com", "content-type": "text/plain"}
        answer = await server.http.post("/pause?mode=wait", content=b"{}", headers=page)
        state = await server.http.get("/is_paused")
    assert (answer.status_code, state.json()) == (403, {"is_paused": False})


async def test_what_the_routes_do_not_understand_is_refused_by_name(tmp_path: Path) -> None:
    async with controlled() as server:
        answers = [
            await server.post("/pause", mode="abort"),
            await server.post("/pause", mode="keep", clear_cache="perhaps"),
            await server.post("/update_weight_version", {"new_version": "the best"}),
            await server.post("/update_weight_version", {"new_version": "1", "abort": True}),
            await server.call("shutdown"),
            await server.call("skyrl_load_weights", {"kind": "folder", "weights": 3}, {}),
            await server.call("skyrl_load_weights", {"kind": "pickle", "weights": []}, {}),
        ]
        state = (await server.http.get("/is_paused")).json()
    assert [answer.status_code for answer in answers] == [400] * len(answers)
    words = ("mode has to be", "mode has to be", "whole number", "'abort' is not a field", "no such call")
    for answer, word in zip(answers, (*words, "not in skyrl's", "not in skyrl's"), strict=True):
        assert word in said(answer)
    assert state == {"is_paused": False}


async def test_weights_are_read_only_while_the_engines_are_paused_and_only_whole(tmp_path: Path) -> None:
    incoming = other_weights(tmp_path)
    damaged = evolve(incoming, weights=incoming.weights[1:])
    async with controlled() as server:
        before = (await server.post("/inference/v1/generate", GENERATE)).json()["choices"]
        early = await server.call("skyrl_load_weights", as_plain(incoming), {})
        await server.post("/pause", mode="wait")
        refused = await server.call("skyrl_load_weights", as_plain(damaged), {})
        await server.post("/resume")
        after = (await server.post("/inference/v1/generate", GENERATE)).json()["choices"]
        await server.post("/pause", mode="wait")
        accepted = await server.call("skyrl_load_weights", as_plain(incoming), {})
        await server.post("/update_weight_version", {"new_version": "7"})
        await server.post("/resume")
        last = (await server.post("/inference/v1/generate", GENERATE)).json()["choices"]
    assert early.json() == {"results": ["weights arrived before the engines were paused"]}
    assert "the old ones are kept" in refused.json()["results"][0]
    assert before == after
    assert accepted.json() == {"results": [acknowledgement(incoming)]}
    assert last[0]["token_ids"] != before[0]["token_ids"]
    assert [before[0]["weight_versions"][0]["version"], last[0]["weight_versions"]] == [
        "0",
        [{"version": "7", "start": 0, "end": len(last[0]["token_ids"])}],
    ]


async def test_every_engine_behind_the_endpoint_gets_the_weights_and_none_a_place_in_a_group(tmp_path: Path) -> None:
    incoming = other_weights(tmp_path)
    group = TransferGroup(host="127.0.0.1", port=1, name="a meeting", size=2, rank=1, timeout=1.0)
    async with controlled(engines=2) as server:
        await server.post("/pause", mode="wait")
        grouped = await server.call("skyrl_load_weights", as_plain(BroadcastWeights(group=group, weights=())), {})
        await server.call("skyrl_load_weights", as_plain(incoming), {})
        await server.post("/update_weight_version", {"new_version": "1"})
        await server.post("/resume")
        drawn = await asyncio.gather(*(server.post("/inference/v1/generate", GENERATE) for _ in range(6)))
    assert "2 engines cannot act as one member of a group" in grouped.json()["results"][0]
    assert len({str(response.json()["choices"]) for response in drawn}) == 1


async def test_a_pause_that_its_run_gave_up_is_made_and_the_next_run_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, started = threading.Event(), threading.Event()
    async with controlled() as server:
        decode = server.engine._causal_lm.decode

        def held(*args: Any, **options: Any) -> Any:
            started.set()
            assert gate.wait(60)
            return decode(*args, **options)

        monkeypatch.setattr(server.engine._causal_lm, "decode", held)
        drawing = asyncio.ensure_future(server.post("/inference/v1/generate", GENERATE))
        await asyncio.to_thread(started.wait, 60)
        pausing = asyncio.ensure_future(server.post("/pause", mode="wait"))
        while not (await server.http.get("/is_paused")).json()["is_paused"]:
            await asyncio.sleep(0.01)
        pausing.cancel()
        gate.set()
        assert (await drawing).status_code == 200
        await server.post("/resume")
        assert (await server.post("/inference/v1/generate", GENERATE)).status_code == 200
