"""The endpoint through OpenAI's own client."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from tests.endpoint.serving import ADD, Script, served, tiny_engine

HELLO: Any = [{"role": "user", "content": "hello"}]


def client(url: str, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


async def test_models_are_listed() -> None:
    async with tiny_engine() as tiny, client(tiny.url) as openai_client:
        assert [model.id async for model in openai_client.models.list()] == ["tiny"]


async def test_a_chat_is_answered_with_n_choices_and_their_tokens() -> None:
    async with tiny_engine() as tiny, client(tiny.url) as openai_client:
        answer: Any = await openai_client.chat.completions.create(
            model="tiny", messages=HELLO, n=2, logprobs=True, max_tokens=5, extra_body={"return_token_ids": True}
        )
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.tokenizer.decode(answer.prompt_token_ids) == prompt
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(
            [token.logprob for token in choice.logprobs.content if math.isfinite(token.logprob) and token.logprob <= 0]
        )
        assert len(choice.logprobs.content) == len(choice.token_ids) == len(choice.weight_versions) <= 5
        assert choice.message.content == tiny.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


async def test_a_seed_draws_the_same_answer_again() -> None:
    async with tiny_engine() as tiny, client(tiny.url) as openai_client:
        drawn = [
            (await openai_client.chat.completions.create(model="tiny", messages=HELLO, seed=seed))
            .choices[0]
            .message.content
            for seed in (1, 1, 2)
        ]
    assert drawn[0] == drawn[1] != drawn[2]


async def test_a_text_and_its_token_ids_are_completed_alike() -> None:
    async with tiny_engine() as tiny, client(tiny.url) as openai_client:
        ids = tiny.tokenizer.encode("ab", add_special_tokens=False)
        answer: Any = await openai_client.completions.create(
            model="tiny", prompt=["ab", "cd"], temperature=0, logprobs=1, extra_body={"return_token_ids": True}
        )
        repeated = await openai_client.completions.create(model="tiny", prompt=ids, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].prompt_token_ids == ids
    assert answer.choices[0].text == repeated.choices[0].text
    assert len(answer.choices[0].logprobs.token_logprobs) == len(answer.choices[0].token_ids)


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    async with tiny_engine() as tiny, client(tiny.url) as openai_client:
        reply = await openai_client.chat.completions.create(model="tiny", messages=HELLO, temperature=0)
        stream = await openai_client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == reply.choices[0].message.content
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == reply.choices[0].finish_reason
    assert chunks[-1].usage == reply.usage


async def test_tools_are_shown_and_calls_are_read() -> None:
    script = Script(['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "3"])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        messages: Any = list(HELLO)
        first = await openai_client.chat.completions.create(model="tiny", messages=messages, tools=[ADD])  # type: ignore[list-item]  # a plain dict
        (call,) = list(first.choices[0].message.tool_calls or [])
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        second = await openai_client.chat.completions.create(model="tiny", messages=messages, tools=[ADD])  # type: ignore[list-item]  # a plain dict
    assert first.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')  # type: ignore[union-attr]  # it is a function
    assert second.choices[0].message.content == "3"
    prompt = script.tokenizer.decode(script.requests[1].prompt_ids)
    assert '"description": "Add two numbers."' in prompt
    assert '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>' in prompt


async def test_a_call_that_cannot_be_read_stays_text() -> None:
    script = Script(["<tool_call>{nothing</tool_call>"])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        answer = await openai_client.chat.completions.create(model="tiny", messages=HELLO, tools=[ADD])  # type: ignore[list-item]  # a plain dict
    assert answer.choices[0].message.content == "<tool_call>{nothing</tool_call>"
    assert answer.choices[0].finish_reason == "stop"


async def test_a_stop_text_is_cut_from_the_text_and_stays_in_the_ids() -> None:
    script = Script(["one STOP"], ends="")
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        answer: Any = await openai_client.chat.completions.create(
            model="tiny", messages=HELLO, stop=["STOP"], extra_body={"return_token_ids": True}
        )
    assert answer.choices[0].message.content == "one "
    assert script.tokenizer.decode(answer.choices[0].token_ids) == "one STOP"
    assert script.requests[0].sampling.stop == ("STOP",)


@pytest.mark.parametrize(
    ("text", "ends", "stop", "expected"),
    [
        ("one <|im_end|>", "", "<|im_end|>", "one "),  # as engines give it: the stop text is in the text
        ("<|im_end|>", "", "<|im_end|>", ""),
        ("one STOP", "<|im_end|>", "STOP", "one STOP"),  # the end of the turn ended it, after a stop text that stands
        ("one", "<|im_end|>", "STOP", "one"),
        ("one<|im_start|>", "", "<|im_start|>", "one"),
    ],
)
async def test_a_stop_text_may_spell_a_special_token(text: str, ends: str, stop: str, expected: str) -> None:
    script = Script([text, text], ends=ends)
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        chat = await openai_client.chat.completions.create(model="tiny", messages=HELLO, stop=["\n", stop])
        plain = await openai_client.completions.create(model="tiny", prompt="a", stop=["\n", stop])
    assert (chat.choices[0].message.content, plain.choices[0].text) == (expected, expected)


async def test_the_likeliest_tokens_stand_beside_each_sampled_one() -> None:
    async with tiny_engine() as tiny, client(tiny.url) as openai_client:
        answer = await openai_client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=5, temperature=0
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    for entry in logprobs.content:
        assert [len(entry.top_logprobs), entry.top_logprobs[0].token] == [3, entry.token]
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-5)


async def test_a_special_token_in_a_message_is_the_letters_that_spell_it() -> None:
    script = Script(["fine"])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        await openai_client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "<|im_end|>"}])
    end = script.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert script.requests[0].prompt_ids.count(end) == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
)
async def test_what_has_no_effect_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    script = Script([])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        with pytest.raises(openai.BadRequestError) as refused:
            await openai_client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **changes})
    assert refused.value.param == param
    assert param.partition("[")[0] in refused.value.message
    assert script.requests == []


async def test_another_model_and_a_prompt_that_fills_the_model_are_refused() -> None:
    script = Script([])
    async with (
        served(script.generate, script.tokenizer, max_model_len=20) as server,
        client(server.url) as openai_client,
    ):
        with pytest.raises(openai.NotFoundError, match="tiny"):
            await openai_client.chat.completions.create(model="gpt-4o", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as refused:
            await openai_client.completions.create(model="tiny", prompt="x" * 20)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"max_tokens": 50}, r"min_tokens = 12, and the answer has room for 10: the prompt has 10 tokens, .* have 20"),
        ({"max_tokens": 5}, "min_tokens = 12, and the answer has room for 5: max_tokens = 5"),
    ],
)
async def test_more_tokens_than_there_is_room_for_are_refused_with_both_numbers(
    lengths: dict[str, Any], message: str
) -> None:
    async with tiny_engine(max_model_len=20) as server, client(server.url) as openai_client:
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            await openai_client.completions.create(
                model="tiny", prompt=[1] * 10, **lengths, extra_body={"min_tokens": 12}
            )
        assert refused.value.param == "min_tokens"


async def test_an_answer_ends_where_the_context_does() -> None:
    async with tiny_engine(max_model_len=20) as server, client(server.url) as openai_client:
        answer = await openai_client.completions.create(
            model="tiny", prompt=[1] * 10, max_tokens=50, extra_body={"min_tokens": 10}
        )
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (10, "length")
