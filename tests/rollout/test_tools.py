from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.envs import find_env, register
from skyrl.errors import DataError
from skyrl.trajectory import Trajectory
from tests.rollout.chats import Says, chat_tokenizer, generator, play, prompt

# Qwen2.5-Instruct, tokenizer_config.json: tools in the system message, results in a user's message; shortened.
QWEN = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOP = f"{Path(__file__).parents[2] / 'examples' / 'tools' / 'shop_env.py'}:ShopEnv"
TOKENIZER = chat_tokenizer(QWEN)
register("tests-shop", find_env(SHOP))

ROW: dict[str, Any] = {"prices": {"apple": 3, "pear": 4}, "reward_spec": {"ground_truth": "10"}}
APPLE = '<tool_call>{"name": "price", "arguments": {"item": "apple"}}</tool_call>'
PLUM = APPLE.replace("apple", "plum")
SUM = '<tool_call>{"name": "python", "arguments": {"code": "print(2 * 3 + 4)"}}</tool_call>'


async def shop(*turns: str) -> tuple[Trajectory, Says]:
    engine = Says(TOKENIZER, [f"{turn}<|im_end|>" for turn in turns])
    gym_generator = generator(engine, TOKENIZER)
    (group,) = await play(gym_generator, prompt(TOKENIZER, "tests-shop", "2 apples, 1 pear?", **ROW))
    (row,) = group.trajectories
    assert isinstance(row, Trajectory)
    return row, engine


async def test_the_template_shows_the_tools_and_results_come_back_as_messages_of_a_tool() -> None:
    row, _ = await shop(APPLE + PLUM, SUM, "10")
    prompt_text = TOKENIZER.decode(row.prompt_ids)
    assert prompt_text.startswith("<|im_start|>system\nTools:")
    assert '"name": "price"' in prompt_text
    assert '"name": "python"' in prompt_text
    assert TOKENIZER.decode(row.response_ids) == (
        f"{APPLE}{PLUM}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>"
        "\n<tool_response>\nError: KeyError: 'plum'\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        f"{SUM}<|im_end|>\n<|im_start|>user\n<tool_response>\n10\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "10<|im_end|>"
    )
    assert row.reward == 1.0
    assert row.metrics == {"tool_calls": 3, "malformed_calls": 0, "tool_errors": 1, "tool_timeouts": 0}


async def test_what_a_tool_echoes_is_cleaned_of_what_no_tokenizer_takes() -> None:
    echo = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    half = '<tool_call>{"name": "price", "arguments": {"item": "\\ud800"}}</tool_call>'
    row, _ = await shop(echo + half, "10")
    assert (row.reward, row.failures) == (1.0, ())


async def test_with_tools_too_only_sampled_tokens_are_trained_on_and_none_is_tokenized_again() -> None:
    row, engine = await shop(APPLE, SUM, "10")
    ids = [token for token, mask in zip(row.response_ids, row.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(ids) == f"{APPLE}<|im_end|>{SUM}<|im_end|>10<|im_end|>"
    tokens = row.prompt_ids + row.response_ids
    assert all(tokens[: len(request.prompt_ids)] == request.prompt_ids for request in engine.requests)


async def test_a_conversation_with_tools_is_what_the_template_writes_of_the_whole_of_it() -> None:
    row, _ = await shop(APPLE, "10")
    env = find_env(SHOP)(ROW)
    messages = [
        {"role": "user", "content": "2 apples, 1 pear?"},
        {"role": "assistant", "content": APPLE},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "10"},
    ]
    full_text = TOKENIZER.apply_chat_template(messages, tools=list(env.tool_schemas()), tokenize=False)
    assert TOKENIZER.decode(row.prompt_ids + row.response_ids) + "\n" == full_text


async def test_a_template_that_shows_no_tools_ends_the_run_with_a_reason() -> None:
    plain = chat_tokenizer()
    with pytest.raises(DataError, match="leaves out the tool .*; or describe the environment's tools in the prompt"):
        await play(generator(Says(plain, ["10"]), plain), prompt(plain, "tests-shop", **ROW))
