"""Tests of the agent and of its score: `pytest`. A score that is wrong is learned, too."""

import asyncio
import json
from typing import Any

import agent
import httpx
import pytest

CLIENT = httpx.AsyncClient


def played(answers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> float:
    """The score of an episode with a 7 on shelf a, in which the model gives these answers."""

    def reply(request: httpx.Request) -> httpx.Response:
        message = {"role": "assistant", "content": "", **answers.pop(0)}
        return httpx.Response(200, json={"choices": [{"message": message}]})

    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: CLIENT(transport=httpx.MockTransport(reply)))
    task = {"reward_spec": {"ground_truth": "7"}, "messages": [], "extra_info": {"shelf": "a"}}
    return asyncio.run(agent.solve(task, "http://model/v1", "key", "model"))


def call(shelf: str) -> dict[str, Any]:
    """An answer that looks at a shelf."""
    function = {"name": "look", "arguments": json.dumps({"shelf": shelf})}
    return {"tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_the_right_answer_is_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played([call("a"), {"content": "7"}], monkeypatch) == 1.0
    assert played([call("b"), {"content": "8"}], monkeypatch) == 0.0
    assert played([{"content": "7"}], monkeypatch) == 1.0


def test_the_tool_tells_what_lies_on_a_shelf() -> None:
    assert agent.look('{"shelf": "a"}', {"a": "7"}) == "7"
    assert agent.look('{"shelf": "b"}', {"a": "7"}) == "nothing"
