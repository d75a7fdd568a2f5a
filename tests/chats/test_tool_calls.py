from __future__ import annotations

import pytest

from skyrl.chats.tool_calls import Call, hermes

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_calls_are_read_in_order_and_the_text_around_them_is_not() -> None:
    calls = hermes(f"I add. {ADD} and {ADD.replace('1', '2')} so")
    assert calls == (Call(name="add", arguments={"a": 1}), Call(name="add", arguments={"a": 2}))


def test_an_answer_without_a_call_is_final() -> None:
    assert hermes("The answer is 4.") == ()


def test_what_is_thought_is_not_called() -> None:
    assert hermes(f"<think>\nPerhaps {ADD}?\n</think>\n4") == ()
    assert hermes(f"<think> no end {ADD}") == ()
    assert hermes(f"<think>now</think>{ADD}") == (Call(name="add", arguments={"a": 1}),)


def test_a_last_call_whose_end_a_stop_text_took_is_read() -> None:
    assert hermes(ADD.removesuffix("</tool_call>")) == (Call(name="add", arguments={"a": 1}),)


def test_a_call_without_arguments_has_none() -> None:
    assert hermes('<tool_call>{"name": "now"}</tool_call>') == (Call(name="now"),)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("add(1, 2)", "not JSON"),
        ('{"name": "add", "arguments": {"a": 1}', "not JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no number"),
        ("[" * 50_000, "not JSON"),
        ("9" * 5_000, "not JSON"),
        ('["add"]', "an object such as"),
        ('{"name": 5}', "an object such as"),
        ('{"name": "add", "arguments": "1"}', "arguments of add have to be an object"),
        ("", "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(inside: str, message: str) -> None:
    (call,) = hermes(f"<tool_call>{inside}</tool_call>")
    assert message in call.unreadable
