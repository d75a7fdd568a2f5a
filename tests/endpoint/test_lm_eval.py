"""lm-evaluation-harness 0.4.13 against the endpoint: its own requests, recorded, and the harness itself.

`lm_eval_requests.json` holds one request of each form that its models `local-completions` and `local-chat-completions`
sent for the tasks of examples/lm_eval, word for word. Token ids are those of the tests' byte tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.config import SamplingParams
from skyrl.endpoint.trajectories import PlayedTrajectory
from skyrl.inference.engine import SampleKey
from tests.endpoint.serving import TOOLS_CHATML, Script, Served, served, tiny_engine
from tests.inference.nano import nano_model
from tests.other_environments import python_with
from tests.rollout.chats import chat_tokenizer

TASKS = Path(__file__).parents[2] / "examples" / "lm_eval"
RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("lm_eval_requests.json").read_text("utf-8"))
SCORING = [request["body"] for request in RECORDED if "echo" in (request["body"] or {})]
DRAWING = [request for request in RECORDED if request["body"] and "echo" not in request["body"]]


def log_probabilities(ids: Sequence[int]) -> tuple[list[float], list[bool]]:
    """What transformers computes for the tokens after the first: log-probabilities, and which are the likeliest."""
    with torch.no_grad():
        values = nano_model()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    targets = torch.tensor(ids[1:])
    return values.gather(1, targets[:, None])[:, 0].tolist(), (values.argmax(-1) == targets).tolist()


def as_read_by_the_harness(choice: Any, before: int) -> tuple[float, bool]:
    """`LocalCompletionsAPI.parse_logprobs` of lm_eval 0.4.13, for one choice with `before` tokens of context."""
    logprobs = choice["logprobs"]["token_logprobs"][before:-1]
    top = choice["logprobs"]["top_logprobs"][before:-1]
    return sum(logprobs), all(own == max(candidates.values()) for own, candidates in zip(logprobs, top, strict=True))


async def answer(server: Served, request: Any) -> tuple[int, Any]:
    """Status and JSON body; sent as it was recorded, with a bearer token that is empty, as httpx would not."""
    return await asyncio.to_thread(_sent, server.url, request)


def _sent(url: str, request: Any) -> tuple[int, Any]:
    body = None if request["body"] is None else json.dumps(request["body"]).encode()
    headers = {"Content-Type": "application/json", **request.get("headers", {})}
    http_request = urllib.request.Request(url + request["path"], body, headers, method=request["method"])
    try:
        with urllib.request.urlopen(http_request) as got:
            return got.status, json.load(got)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def completion(body: dict[str, Any]) -> dict[str, Any]:
    return {"method": "POST", "path": "/v1/completions", "headers": {"Authorization": "Bearer "}, "body": body}


@pytest.mark.parametrize("body", SCORING, ids=lambda body: type(body["prompt"][0]).__name__)
async def test_a_log_likelihood_is_that_of_transformers(body: Any) -> None:
    async with tiny_engine() as tiny:
        _, got = await answer(tiny, completion(body))
    texts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
    prompts = [tiny.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    assert [choice["index"] for choice in got["choices"]] == list(range(len(prompts)))
    for ids, choice in zip(prompts, got["choices"], strict=True):
        expected, likeliest = log_probabilities(ids)
        for before in (1, len(ids) - 1):
            logprob, greedy = as_read_by_the_harness(choice, before)
            assert logprob == pytest.approx(sum(expected[before - 1 :]), abs=1e-3)
            assert greedy == all(likeliest[before - 1 :])
    assert got["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_the_likeliest_continuation_counts_as_greedy() -> None:
    async with tiny_engine() as tiny:
        ids = SCORING[0]["prompt"][0]
        with torch.no_grad():
            best = int(nano_model()(torch.tensor([ids])).logits[0, -1].argmax())
        body = SCORING[0] | {"prompt": [[*ids, best], [*ids, (best + 1) % 256]]}
        _, got = await answer(tiny, completion(body))
    assert [as_read_by_the_harness(choice, len(ids))[1] for choice in got["choices"]] == [True, False]


@pytest.mark.parametrize("request_", DRAWING, ids=lambda request: request["path"])
async def test_its_requests_for_texts_are_answered(request_: Any) -> None:
    async with tiny_engine() as tiny:
        status, got = await answer(tiny, request_)
    assert status == 200
    prompts = request_["body"].get("prompt", "")
    count = 1 if isinstance(prompts, str) else len(prompts)
    texts = [choice.get("text", choice.get("message", {}).get("content")) for choice in got["choices"]]
    assert len(texts) == count and all(isinstance(text, str) and "\n" not in text for text in texts)


async def test_it_is_told_that_the_tokenizer_is_not_served_here() -> None:
    script = Script([])
    async with served(script.generate, script.tokenizer) as server:
        status, _ = await answer(server, next(request for request in RECORDED if request["path"] == "/tokenizer_info"))
    assert status == 404


async def test_the_prompt_alone_is_scored_with_no_new_token() -> None:
    async with tiny_engine() as tiny:
        bodies = [SCORING[0] | {"max_tokens": count, "return_token_ids": True} for count in (0, 1)]
        (_, none), (_, one) = [await answer(tiny, completion(body)) for body in bodies]
    for ids, less, more in zip(SCORING[0]["prompt"], none["choices"], one["choices"], strict=True):
        assert more["logprobs"]["token_logprobs"][:-1] == less["logprobs"]["token_logprobs"]
        assert len(less["logprobs"]["tokens"]) == len(less["logprobs"]["top_logprobs"]) == len(ids)
        assert (less["token_ids"], less["finish_reason"]) == ([], "length")
        assert less["text"] == tiny.tokenizer.decode(ids) and more["text"].startswith(less["text"])
    assert none["usage"]["completion_tokens"] == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"echo": "yes"}, "echo has to be true or false"),
    ({"echo": True, "stream": True}, "a stream does not repeat the prompt"),
    ({"echo": True, "logprobs": 5}, "logprobs = 5 is not supported"),
    ({"echo": True, "max_tokens": -1}, "max_tokens has to be a whole number from 0"),
    ({"echo": True, "max_tokens": False}, "max_tokens has to be a whole number from 0"),
    ({"echo": False, "max_tokens": 0}, "max_tokens has to be a whole number from 1"),
    ({"echo": True, "logprobs": 1, "prompt": [[1] * 400] * 6, "n": 128}, "the prompts have 2400 tokens, of which at"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
async def test_what_cannot_be_repeated_or_scored_is_refused(changes: dict[str, Any], message: str) -> None:
    async with tiny_engine(most_samples=1024) as tiny:
        status, got = await answer(tiny, completion({"model": "tiny", "prompt": "a", **changes}))
    assert status == 400 and message in got["error"]["message"]


async def test_engines_that_score_no_prompts_say_so() -> None:
    script = Script(["b"])
    async with served(script.generate, script.tokenizer) as server:
        status, refused = await answer(server, completion({"prompt": "a", "echo": True, "logprobs": 1}))
        _, repeated = await answer(server, completion({"prompt": "a", "echo": True}))
    assert status == 400 and "of sampled tokens only" in refused["error"]["message"]
    assert repeated["choices"][0]["text"] == "ab"


async def test_an_agent_gets_no_probabilities_of_its_prompts() -> None:
    sample = SampleKey(run_seed=0, weight_version=0, prompt_id="a task", sample_index=0)
    played = PlayedTrajectory(sample, SamplingParams(), most_requests=1)
    async with tiny_engine() as tiny:
        with tiny.endpoint.trajectories.playing(played) as trajectory:
            request = completion({"prompt": "a", "echo": True, "logprobs": 1})
            status, refused = await answer(tiny, request | {"headers": {"x-api-key": trajectory.key}})
    assert (status, refused["error"]["param"]) == (400, "echo")


def samples(folder: Path, task: str) -> Iterator[dict[str, Any]]:
    """What the harness stored of each row of a task."""
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())


@pytest.mark.long
@pytest.mark.parametrize("form", ["max_length=255", "max_length=255,tokenized_requests=False,num_concurrent=4"])
async def test_the_harness_itself_scores_as_transformers_does(form: str, tmp_path: Path) -> None:
    chat_tokenizer(TOOLS_CHATML).save_pretrained(tmp_path / "tokenizer")
    harness = python_with("lm-eval", ["lm_eval[api]==0.4.13", "transformers==5.19.0"])
    tasks = "sums_choice,sums_answer,sums_text"
    async with tiny_engine(most_samples=1024) as tiny:
        model = f"model=tiny,tokenizer={tmp_path / 'tokenizer'},base_url={tiny.url}/v1/completions,{form}"
        command = [harness, "-m", "lm_eval", "run", "--include_path", ".", "--tasks", tasks, "--log_samples"]
        command += ["--model", "local-completions", "--model_args", model, "--output_path", str(tmp_path / "out")]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        process = await asyncio.create_subprocess_exec(*command, cwd=TASKS, env=environ)
        assert await process.wait() == 0
    encode = tiny.tokenizer.encode
    for row in samples(tmp_path / "out", "sums_choice"):
        for choice, [(logprob, greedy)] in zip(row["doc"]["choices"], row["resps"], strict=True):
            context, ids = encode(row["doc"]["question"]), encode(f"{row['doc']['question']} {choice}")
            expected, likeliest = log_probabilities(ids)
            assert float(logprob) == pytest.approx(sum(expected[len(context) - 1 :]), abs=1e-3)
            assert greedy == str(all(likeliest[len(context) - 1 :]))
    assert (
        len(list(samples(tmp_path / "out", "sums_answer"))) == len(list(samples(tmp_path / "out", "sums_text"))) == 17
    )
