"""Prompts that cannot fit, requests that never can be answered, and answers that end like a stop text."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from skyrl.config import SamplingParams
from skyrl.endpoint.policy import CHARACTERS_PER_TOKEN, BoundedTokenizer
from skyrl.endpoint.trajectories import MOST_AT_ONCE, PlayedTrajectory
from skyrl.errors import RequestError
from skyrl.inference.engine import SampleKey
from tests.endpoint.serving import Script, served
from tests.endpoint.test_openai_client import HELLO, client

LONG = "x" * 100_000
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
}


class Counting:
    """A tokenizer with one token for every `size` characters, which counts the characters that it reads."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, 0

    def encode(self, text: str, **_: object) -> list[int]:
        self.read += len(text)
        return [0] * -(-len(text) // self.size)


@pytest.mark.parametrize("size", [1, 3, 8, 16])
def test_the_work_for_a_prompt_is_bounded_by_what_fits_and_not_by_its_length(size: int) -> None:
    most, counting = 64, Counting(size)
    bounded = BoundedTokenizer(counting, most)  # type: ignore[arg-type]  # of a tokenizer, it has what is called
    with pytest.raises(RequestError, match="tokens, and prompt and answer together may have 64"):
        bounded.encode("a" * 4_000_000, add_special_tokens=False)
    assert counting.read <= 8 * most * max(size, CHARACTERS_PER_TOKEN)


@pytest.mark.parametrize("size", [1, 3, 8, 16, 1000])
@pytest.mark.parametrize("count", [1, 63, 64])
def test_a_text_that_fits_is_never_refused(size: int, count: int) -> None:
    bounded = BoundedTokenizer(Counting(size), 64)  # type: ignore[arg-type]  # as above
    assert len(bounded.encode("a" * (size * count), add_special_tokens=False)) == count


@pytest.mark.parametrize("path", ASKED)
async def test_a_prompt_that_cannot_fit_is_refused_by_its_beginning(path: str) -> None:
    script = Script([])
    async with (
        served(script.generate, script.tokenizer, max_model_len=64) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        answer = await http.post(path, json={"model": "tiny", **ASKED[path]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], script.requests) == (400, "context_length_exceeded", [])
    assert "more than" in error["message"]


async def test_more_answers_than_ever_are_sampled_at_once_are_not_to_be_tried_again() -> None:
    script = Script(["x"] * 8)
    async with served(script.generate, script.tokenizer, most_samples=4) as server, client(server.url) as openai_client:
        for prompts, n in (("a", 5), (["a"] * 5, 1), (["a"] * 3, 2)):
            with pytest.raises(openai.BadRequestError, match="answers at once: at most 4 are sampled"):
                await openai_client.completions.create(model="tiny", prompt=prompts, n=n)
        assert len((await openai_client.completions.create(model="tiny", prompt=["a"] * 2, n=2)).choices) == 4


def test_an_agent_that_asks_for_too_many_answers_is_not_told_to_try_again() -> None:
    sample = SampleKey(run_seed=0, weight_version=0, prompt_id="a task", sample_index=0)
    trajectory = PlayedTrajectory(sample, SamplingParams(), most_requests=1)
    with pytest.raises(RequestError) as refused:
        trajectory.begin(MOST_AT_ONCE + 1)
    assert refused.value.status == 400


async def test_an_answer_that_ends_by_its_token_keeps_the_letters_of_a_stop_text() -> None:
    """With min_tokens, "44" may be drawn under the stop text "4": what ended it is the token at its end."""
    script = Script(["44"] * 5)
    async with (
        served(script.generate, script.tokenizer) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):

        async def answer(path: str, **body: Any) -> Any:
            return (await http.post(path, json={"model": "tiny", **body})).json()

        limits = {"stop": ["4"], "min_tokens": 2}
        chat = await answer("/v1/chat/completions", messages=HELLO, **limits)
        text = await answer("/v1/completions", prompt="a", **limits)
        message = await answer("/v1/messages", messages=HELLO, max_tokens=8, stop_sequences=["4"])
        drawn = await answer("/inference/v1/generate", token_ids=[1], sampling_params=limits)
        stream = await http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **limits})
    end = script.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"] == "44"
    assert (message["content"][0]["text"], message["stop_reason"], message["stop_sequence"]) == ("44", "end_turn", None)
    assert [drawn["choices"][0]["stop_reason"]] == end
    assert '"content": "44"' in stream.text


async def test_a_model_and_a_response_are_retrieved_by_their_ids() -> None:
    script = Script(["one", "two", "three"])
    async with (
        served(script.generate, script.tokenizer, adapters=("org/math",)) as server,
        client(server.url) as openai_client,
    ):
        assert [(await openai_client.models.retrieve(name)).id for name in ("tiny", "org/math")] == ["tiny", "org/math"]
        response = await openai_client.responses.create(model="tiny", input="a")
        async with openai_client.responses.stream(model="tiny", input="b") as stream:
            streamed = await stream.get_final_response()
        unstored = await openai_client.responses.create(model="tiny", input="c", store=False)
        for original in (response, streamed):
            retrieved = await openai_client.responses.retrieve(original.id)
            assert (retrieved.output_text, retrieved.id, retrieved.usage) == (
                original.output_text,
                original.id,
                original.usage,
            )
        with pytest.raises(openai.NotFoundError):
            await openai_client.models.retrieve("other")
        for number in (unstored.id, "resp_none"):
            with pytest.raises(openai.NotFoundError):
                await openai_client.responses.retrieve(number)
