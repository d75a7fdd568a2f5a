"""The Responses API through OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from skyrl.endpoint import trajectories
from skyrl.endpoint.conversations import History
from skyrl.endpoint.trajectories import StoredResponses
from skyrl.errors import RequestError
from tests.endpoint.serving import Script, served, tiny_engine
from tests.endpoint.test_openai_client import client

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


async def test_a_text_is_answered_under_instructions() -> None:
    async with tiny_engine() as tiny, client(tiny.url) as openai_client:
        answer = await openai_client.responses.create(
            model="tiny", instructions="be brief", input="hello", max_output_tokens=4
        )
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(tiny.tokenizer.encode(prompt))
    assert answer.usage.output_tokens <= 4
    assert answer.status == ("incomplete" if answer.incomplete_details else "completed")
    assert (answer.instructions, answer.max_output_tokens) == ("be brief", 4)


async def test_a_tool_is_called_and_its_output_read() -> None:
    script = Script([f"so {CALL}", "3"])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
        first = await openai_client.responses.create(model="tiny", input=items, tools=[ADD])
        message, call = first.output
        assert call.type == "function_call"
        items += [message, call, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
        second = await openai_client.responses.create(model="tiny", input=items, tools=[ADD])
    assert first.output_text == "so"
    assert (call.name, call.arguments) == ("add", '{"a": 1, "b": 2}')
    assert second.output_text == "3"
    prompt = script.tokenizer.decode(script.requests[1].prompt_ids)
    assert f"assistant\nso{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>" in prompt
    assert '"description": "Add two numbers."' in prompt


async def test_an_earlier_response_is_continued_without_its_instructions() -> None:
    script = Script(["one", "two", "three"])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        first = await openai_client.responses.create(model="tiny", instructions="be brief", input="a")
        second = await openai_client.responses.create(
            model="tiny", input="b", previous_response_id=first.id, store=False
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await openai_client.responses.create(model="tiny", input="c", previous_response_id=second.id)
    assert refused.value.code == "previous_response_not_found"
    assert second.previous_response_id == first.id
    assert script.tokenizer.decode(script.requests[1].prompt_ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", [f"so {CALL}", CALL, "so", ""])
async def test_the_events_of_a_stream_are_those_of_the_whole_response(text: str) -> None:
    script = Script([text])
    async with (
        served(script.generate, script.tokenizer) as server,
        client(server.url) as openai_client,
        openai_client.responses.stream(model="tiny", input="1+2?", tools=[ADD]) as stream,
    ):
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    output_text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert output_text == response.output_text == text.partition(" <")[0].removesuffix(CALL)
    completed = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.type, getattr(item, "id", "")) for item in completed] == [
        (item.type, getattr(item, "id", "")) for item in response.output
    ]
    calls = [item.arguments for item in response.output if item.type == "function_call"]
    assert calls == (['{"a": 1, "b": 2}'] if CALL in text else [])
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
)
async def test_what_has_no_effect_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    script = Script([])
    async with served(script.generate, script.tokenizer) as server, client(server.url) as openai_client:
        with pytest.raises(openai.BadRequestError) as refused:
            await openai_client.responses.create(**{"model": "tiny", "input": "hello", **changes})
    assert refused.value.param == param
    assert script.requests == []


def test_the_oldest_responses_make_way_for_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "STORED_CHARACTERS", 170)
    stored = StoredResponses()
    for number in ("a", "b", "c"):
        stored.keep({"id": number}, History(({"role": "user", "content": "x" * 30},)))  # 65 + 11 characters each
    with pytest.raises(RequestError, match="no response 'a' here"):
        stored.history("a")
    assert stored.history("b") == stored.history("c")
