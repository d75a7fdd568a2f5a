"""Streamed answers of servers, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl.inference.engine import NewTokens
from skyrl.inference.servers.answers import RequestedSample
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.streams import Growing, Parts
from skyrl.inference.servers.vllm_server import VLLMServer
from skyrl.processes.answers import BadAnswer
from tests.inference.nano import nano_tokenizer, prompts, request
from tests.inference.server_engines import DEADLINES, vllm_server
from tests.inference.vllm_models import saved, small_model


def asked(heard: list[NewTokens], limit: int = 4) -> RequestedSample:
    """Sample 1 of a request, of at most `limit` tokens, from a vocabulary of 10."""
    sample = evolve(request((1, 2), count=2), on_tokens=heard.append)
    return RequestedSample(request=sample, index=1, limit=limit, vocabulary=10, ends=frozenset({9}), versions=())


def part(*token_ids: int, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": list(token_ids), "finish_reason": None, **more}]}


def test_parts_of_an_answer_of_vllm_are_joined_as_it_would_have_come_in_one() -> None:
    heard: list[NewTokens] = []
    parts = Parts(asked(heard))
    first = {"prompt_token_ids": [1, 2], **part(3, logprobs={"content": [{"token_id": 3, "logprob": -1.0}]})}
    parts.add(first)
    parts.add(part(4, 5, logprobs={"content": [{"token_id": 4, "logprob": -2.0}, {"token_id": 5, "logprob": -3.0}]}))
    parts.add(part(finish_reason="stop", weight_versions=[{"version": "1", "start": 0, "end": 3}]))
    parts.add({"choices": [], "usage": {"completion_tokens": 3}})
    (choice,) = parts.answer["choices"]
    assert parts.answer["prompt_token_ids"] == [1, 2]
    assert choice["token_ids"] == [3, 4, 5]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-1.0, -2.0, -3.0]
    assert (choice["finish_reason"], choice["weight_versions"][0]["end"]) == ("stop", 3)
    assert [(new.index, new.start, new.token_ids) for new in heard] == [(1, 0, (3,)), (1, 1, (4, 5))]
    assert first["choices"][0]["token_ids"] == [3]  # events are left as they came


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (part(10), "token 10, outside the vocabulary of 10"),
        (part(1, 2, 3, 4, 5), "more tokens than the 4"),
        ({"choices": part(1)["choices"] * 2}, "not have exactly one choice"),
        ({}, "not have exactly one choice"),
        ([], "a part of an answer"),
        ({"choices": [7]}, "a choice"),
        ({"choices": [{"token_ids": ["a"]}]}, "token ids"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_before_a_token_of_it_is_reported(event: Any, message: str) -> None:
    heard: list[NewTokens] = []
    with pytest.raises(BadAnswer, match=message):
        Parts(asked(heard)).add(event)
    assert heard == []


def test_the_new_tokens_among_all_so_far_are_reported_once() -> None:
    heard: list[NewTokens] = []
    answer = Growing(asked(heard))
    for count in (1, 3, 3):
        answer.add({"output_ids": [5, 6, 7][:count], "meta_info": {"completion_tokens": count}})
    assert [(new.start, new.token_ids) for new in heard] == [(0, (5,)), (1, (6, 7))]
    assert answer.answer["output_ids"] == [5, 6, 7]


def test_a_server_that_streams_tokens_without_those_before_them_is_named() -> None:
    answer = Growing(asked([]))
    answer.add({"output_ids": [5], "meta_info": {"completion_tokens": 1}})
    with pytest.raises(BadAnswer, match="1 tokens of 2: a server started with --stream-output is not supported"):
        answer.add({"output_ids": [6], "meta_info": {"completion_tokens": 2}})


@pytest.mark.long
async def test_both_routes_of_a_server_of_vllm_stream_the_answer_that_they_give_in_one(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", small_model())
    url = vllm_server(folder)
    for route in ("/inference/v1/generate", "/v1/completions"):
        server = VLLMServer(Connection(url), Connection(url), DEADLINES)
        engine = HttpEngine(server, model_path=str(folder), heartbeat=120.0, tokenizer=nano_tokenizer())
        heard: list[NewTokens] = []
        question = request(prompts(7)[0], max_generate_length=20, min_new_tokens=20)
        await engine.generate(question)  # connects, which chooses the first route
        server.route = route
        (completion,) = await engine.generate(question)
        (streamed,) = await engine.generate(evolve(question, on_tokens=heard.append))
        assert server.route == route
        assert streamed.token_ids == completion.token_ids == sum((new.token_ids for new in heard), ())
        assert streamed.logprobs == pytest.approx(completion.logprobs, abs=1e-5)
        await engine.close()
