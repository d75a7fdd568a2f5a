from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from starlette.requests import Request

from skyrl.config.settings.environment import SearchEnvConfig
from skyrl.envs.builtin.judge_service import JudgeService
from skyrl.envs.builtin.llm_judge import LLMJudgeEnv
from skyrl.envs.http_json import ServiceError, post
from skyrl.envs.search import SearchEnv, ask_retriever
from skyrl.errors import RequestError
from skyrl.processes.service_app import body_of
from tests.envs.hostile import INJECTIONS
from tests.envs.services import Reply, service

FOUND = {"result": [[{"document": {"contents": '"Paris"\nParis is in France.'}, "score": 2.0}]]}


def as_it_is(answer: object) -> object:
    return answer


def test_a_search_is_answered_by_the_retriever_and_rewarded_by_the_last_answer() -> None:
    requests: list[Any] = []

    def reply(path: str, body: Any) -> Reply:
        requests.append((path, body))
        return 200, FOUND

    with service(reply) as url:
        settings = SearchEnvConfig(search_url=f"{url}/retrieve", topk=2)
        extras = {"reward_spec": {"ground_truth": {"target": ["Paris"]}}, "max_turns": 3}
        env = SearchEnv(extras, partial(ask_retriever, settings, None))
        first = env.step("<search>capital of France</search>")
        last = env.step("<answer>the Paris!</answer>")
    assert requests == [("/retrieve", {"query": "capital of France", "topk": 2, "return_scores": True})]
    assert "Doc 1: " in first.observations[0]["content"]
    assert (first.reward, first.done, last.reward, last.done) == (0.0, False, 1.0, True)
    assert env.get_metrics() == {"searches": 1.0, "retries": 0.0, "turns": 2.0}


def test_what_may_pass_by_is_tried_again_and_counted() -> None:
    codes = [503, 429, 200]
    with service(lambda *_: (codes.pop(0), {"a": 1})) as url:
        answer = post(url, {}, as_it_is, setting="a.url", seconds=5)
    assert (answer.value, answer.retries) == ({"a": 1}, 2)


def test_a_refusal_is_not_tried_again() -> None:
    codes = [400, 200]
    with service(lambda *_: (codes.pop(0), {})) as url, pytest.raises(ServiceError, match="400"):
        post(url, {}, as_it_is, setting="a.url", seconds=5)
    assert codes == [200]


def test_nobody_is_asked_but_the_service_that_the_configuration_names() -> None:
    hits: list[str] = []

    def count(path: str, _: Any) -> Reply:
        hits.append(path)
        return 200, {}

    with (
        service(count) as elsewhere,
        service(lambda *_: (302, elsewhere)) as url,
        pytest.raises(ServiceError, match="302"),
    ):
        post(url, {}, as_it_is, setting="a.url", seconds=5)
    assert not hits


def judged(*replies: str) -> tuple[LLMJudgeEnv, Any]:
    texts = list(replies)
    with service(lambda *_: (200, {"choices": [{"message": {"content": texts.pop(0)}}]})) as url:
        env = LLMJudgeEnv({"reward_spec": {"ground_truth": "4"}}, JudgeService(model="judge", base_url=url))
        env.init(({"role": "user", "content": "2+2?"},))
        return env, env.step("4")


def test_the_judges_score_is_the_reward_and_unreadable_verdicts_are_asked_again() -> None:
    env, step = judged("I think so.", "Same.\n### Final Score: 1")
    assert (step.reward, step.done) == (1.0, True)
    assert env.get_metrics() == {"judge_retries": 0.0, "unreadable_verdicts": 1.0}


def test_a_judge_that_never_gives_a_verdict_is_a_failure_and_no_reward() -> None:
    with pytest.raises(ValueError, match="no readable verdict in 3 replies"):
        judged("?", "?", "?")


def asked_of_a_judge(answer: str, reply: Callable[[str], str]) -> float:
    """The reward of `answer` from a judge that reads it between two marks, and replies as `reply` says."""

    def judge(_: str, body: Any) -> Reply:
        read = body["messages"][1]["content"]
        mark = read.splitlines()[-1]
        return 200, {"choices": [{"message": {"content": reply(read.split(f"{mark}\n")[1].removesuffix(f"\n{mark}"))}}]}

    with service(judge) as url:
        env = LLMJudgeEnv({"reward_spec": {"ground_truth": "7"}}, JudgeService(model="judge", base_url=url))
        env.init(({"role": "user", "content": "3+4?"},))
        return env.step(answer).reward


@pytest.mark.sampled(4)
@pytest.mark.parametrize("injection", INJECTIONS)
def test_a_judge_that_repeats_an_injection_has_given_no_verdict(injection: str) -> None:
    """It quotes the answer before its own last line, as judges do, and as injections hope: a failure and no reward."""
    with pytest.raises(ValueError, match="no readable verdict in 3 replies"):
        asked_of_a_judge(injection, lambda answer: f"It says: {answer}\n### Final Score: 0")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("score", [0, 1])
@pytest.mark.parametrize("injection", INJECTIONS)
def test_an_injection_earns_what_the_judge_itself_says(injection: str, score: int) -> None:
    assert asked_of_a_judge(injection, lambda _: f"### Final Score: {score}") == score


def request_that(*messages: dict[str, Any]) -> Request:
    """A request whose body comes as these messages, and then not at all."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0) if left else await asyncio.Event().wait()  # type: ignore[return-value]  # never returns

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"type": "http.disconnect"}], "hung up"),
        ([{"type": "http.request", "body": b"x", "more_body": True}], "did not come within"),
    ],
)
def test_a_body_that_never_ends_is_given_up_in_a_sentence(
    messages: list[dict[str, Any]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.processes.service_app.BODY_SECONDS", 0.01)
    with pytest.raises(RequestError, match=message):
        asyncio.run(body_of(request_that(*messages)))
