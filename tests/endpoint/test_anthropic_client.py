"""The endpoint through Anthropic's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.endpoint.serving import Script, served, tiny_engine

if TYPE_CHECKING:
    import anthropic  # takes two seconds, which every process of pytest -n would spend

HELLO: Any = [{"role": "user", "content": "hello"}]
ADD: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def client(url: str) -> anthropic.AsyncAnthropic:
    import anthropic

    return anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0, timeout=60)


@pytest.mark.long
async def test_a_message_is_answered_and_its_tokens_are_counted() -> None:
    async with tiny_engine() as tiny, client(tiny.url) as anthropic_client:
        answer = await anthropic_client.messages.create(model="tiny", max_tokens=4, system="be brief", messages=HELLO)
        counted = await anthropic_client.messages.count_tokens(model="tiny", system="be brief", messages=HELLO)
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.input_tokens == counted.input_tokens == len(tiny.tokenizer.encode(prompt))
    assert answer.usage.output_tokens <= 4
    assert answer.content[0].type == "text"


@pytest.mark.long
async def test_a_tool_is_used_and_its_result_read() -> None:
    script = Script([f"so {CALL}", "3"])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as anthropic_client:
        messages = list(HELLO)
        first = await anthropic_client.messages.create(model="tiny", max_tokens=64, messages=messages, tools=[ADD])
        text, use = first.content
        assert use.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await anthropic_client.messages.create(model="tiny", max_tokens=64, messages=messages, tools=[ADD])
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert text.type == "text" and text.text == "so"
    assert (use.name, use.input) == ("add", {"a": 1, "b": 2})
    assert "<|im_start|>tool\n3<|im_end|>" in script.tokenizer.decode(script.requests[1].prompt_ids)


@pytest.mark.long
async def test_a_stream_says_what_the_whole_message_says() -> None:
    script = Script([f"so {CALL}"])
    async with (
        served(script.generate, script.tokenizer) as server,
        client(server.url) as anthropic_client,
        anthropic_client.messages.stream(model="tiny", max_tokens=64, messages=HELLO, tools=[ADD]) as stream,
    ):
        message = await stream.get_final_message()
    text, use = message.content
    assert text.type == "text" and text.text == "so"
    assert use.type == "tool_use" and use.input == {"a": 1, "b": 2}
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(script.tokenizer.encode(f"so {CALL}<|im_end|>"))


@pytest.mark.long
async def test_a_stop_sequence_is_named() -> None:
    script = Script(["one STOP"], ends="")
    async with served(script.generate, script.tokenizer) as server, client(server.url) as anthropic_client:
        answer = await anthropic_client.messages.create(
            model="tiny", max_tokens=9, messages=HELLO, stop_sequences=["STOP"]
        )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert answer.content[0].type == "text" and answer.content[0].text == "one "


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tool_choice": {"type": "any"}},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    ],
)
async def test_what_has_no_effect_is_refused(changes: dict[str, Any]) -> None:
    import anthropic

    script = Script([])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as anthropic_client:
        with pytest.raises(anthropic.BadRequestError):
            await anthropic_client.messages.create(
                **{"model": "tiny", "max_tokens": 2000, "messages": HELLO, **changes}
            )
    assert script.requests == []
