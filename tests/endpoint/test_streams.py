"""Streams: a client has the tokens that were sampled while the engine is held before the next one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import pytest

from skyrl.errors import RunError
from skyrl.inference.engine import GenerationRequest, NewTokens
from skyrl.inference.torch.engine import TorchEngine
from tests.endpoint import test_anthropic_client
from tests.endpoint.serving import TOOLS_CHATML, Held, served
from tests.endpoint.test_openai_client import client
from tests.inference.nano import nano_model
from tests.rollout.chats import chat_tokenizer

HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT = "héllo world"
Texts = AsyncGenerator[str, None]


async def chats(url: str, **more: Any) -> Texts:
    async with client(url) as openai_client:
        stream = await openai_client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **more)
        async with stream:
            async for chunk in stream:
                yield "".join(choice.delta.content or "" for choice in chunk.choices)


async def completions(url: str) -> Texts:
    async with client(url) as openai_client:
        stream = await openai_client.completions.create(model="tiny", prompt="hello", stream=True)
        async with stream:
            async for chunk in stream:
                yield "".join(choice.text for choice in chunk.choices)


async def messages(url: str) -> Texts:
    async with (
        test_anthropic_client.client(url) as anthropic_client,
        anthropic_client.messages.stream(model="tiny", max_tokens=64, messages=HELLO) as stream,
    ):
        async for text in stream.text_stream:
            yield text


async def responses(url: str) -> Texts:
    async with client(url) as openai_client:
        stream = await openai_client.responses.create(model="tiny", input="hello", stream=True)
        async with stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    yield event.delta


async def until(texts: Texts, expected: str) -> None:
    """Read until `expected` has come."""
    so_far = ""
    while so_far != expected:
        so_far += await anext(texts)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stream_texts", [chats, completions, messages, responses])
async def test_tokens_reach_the_client_while_the_engine_is_held(stream_texts: Callable[[str], Texts]) -> None:
    engine = Held(TEXT, count=6)
    async with served(engine.generate, engine.tokenizer) as server:
        texts = stream_texts(server.url)
        await asyncio.wait_for(until(texts, "héllo"), 60)  # é is two tokens
        engine.let_go.set()
        rest = "".join([text async for text in texts])
    assert rest == " world"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stream_texts", [chats, completions, messages, responses])
async def test_a_client_that_goes_away_gives_its_sample_up(stream_texts: Callable[[str], Texts]) -> None:
    engine = Held(TEXT, count=3)
    async with served(engine.generate, engine.tokenizer, most_samples=1) as server:
        texts = stream_texts(server.url)
        await asyncio.wait_for(until(texts, "hé"), 60)
        await texts.aclose()
        await asyncio.wait_for(engine.given_up.wait(), 60)


async def test_half_a_character_a_stop_text_and_a_call_wait_until_they_are_whole() -> None:
    engine = Held("hé", count=2)
    async with served(engine.generate, engine.tokenizer) as server:
        texts = chats(server.url)
        await asyncio.wait_for(until(texts, "h"), 60)
        engine.let_go.set()
        assert "".join([text async for text in texts]) == "é"
    stopped = Held("one ST", count=6)
    async with served(stopped.generate, stopped.tokenizer) as server:
        texts = chats(server.url, stop=["STOP"])
        await asyncio.wait_for(until(texts, "one "), 60)
        stopped.let_go.set()
        assert "".join([text async for text in texts]) == "ST"  # it was none


async def test_the_torch_engines_tokens_reach_the_client_before_the_next_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, gate, steps = chat_tokenizer(TOOLS_CHATML), threading.Event(), 0
    engine = TorchEngine(nano_model(), tokenizer, max_num_seqs=4)
    decode = engine._causal_lm.decode

    def held(*args: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:  # the prompt gave the first token
            assert gate.wait(60)
        return decode(*args, **options)

    async with served(engine.generate, tokenizer) as server, client(server.url) as openai_client:
        options: Any = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 8}
        completion: Any = await openai_client.completions.create(**options, extra_body={"return_token_ids": True})
        ids = completion.choices[0].token_ids
        assert len(ids) == 8
        monkeypatch.setattr(engine._causal_lm, "decode", held)
        drawn = tokenizer.decode(ids[:3]).rstrip("\N{REPLACEMENT CHARACTER}")
        stream = await openai_client.completions.create(**options, stream=True)
        texts = (chunk.choices[0].text async for chunk in stream)
        await asyncio.wait_for(until(texts, drawn), 60)
        gate.set()
        rest = "".join([text async for text in texts])
    await engine.close()
    assert drawn and drawn + rest == completion.choices[0].text


async def test_an_engine_that_fails_is_a_status_before_the_first_token_and_an_event_behind_it() -> None:
    tokenizer, drawn = chat_tokenizer(TOOLS_CHATML), [(), (0,)]

    async def generate(request: GenerationRequest) -> Any:
        assert request.on_tokens is not None
        for token in drawn.pop(0):
            request.on_tokens(NewTokens(index=0, start=0, token_ids=(token,)))
        raise RunError("out of order")

    async with served(generate, tokenizer) as server:
        with pytest.raises(openai.APIStatusError, match="out of order") as early:
            await until(chats(server.url), "never")
        with pytest.raises(openai.APIError, match="out of order") as late:
            await until(chats(server.url), "never")
    assert early.value.status_code == 503
    assert not isinstance(late.value, openai.APIStatusError)
