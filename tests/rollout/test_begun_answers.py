"""Prompts that begin the answer or bring tools, and replies that a template passes over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl.config import ChatTemplateConfig
from skyrl.envs import Env, EnvStep, register
from skyrl.envs.tools import Tool, ToolEnv
from skyrl.errors import DataError
from skyrl.trajectory import Prompt
from tests.endpoint.serving import ADD, TOOLS_CHATML, Script, served
from tests.rollout.chats import CHATML, Says, chat_tokenizer, generator, play

TOKENIZER = chat_tokenizer(TOOLS_CHATML)
ASKED = {"role": "user", "content": "1+1?"}
BEGUN = {"role": "assistant", "content": "It is"}
seen: list[Any] = []


class Notes(Env):
    """Notes what it is shown, and asks again once."""

    role = "user"

    def init(self, prompt: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seen[:] = [prompt]
        return super().init(prompt)

    def step(self, action: str) -> EnvStep:
        seen.append(action)
        is_second = len(seen) == 2
        return EnvStep(
            reward=1.0, done=not is_second, observations=({"role": self.role, "content": "Sure?"},) if is_second else ()
        )


class Briefed(Notes):
    def init(self, prompt: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        messages, information = super().init(prompt)
        return ({"role": "system", "content": "Be short."}, *messages), information


class Mutters(Notes):
    role = "narrator"


class Multiplies(ToolEnv):
    tools = (Tool(name="mul", description="Multiply.", parameters={"type": "object"}, run=lambda a, b: a * b),)

    def judge(self, answer: str) -> EnvStep:
        return EnvStep(reward=1.0, done=True)


for made in (Notes, Briefed, Mutters, Multiplies):
    register(f"tests-begun-{made.__name__.lower()}", made)


def prompt(env: str, *messages: Mapping[str, str], tokenizer: Any = TOKENIZER, tools: Any = ()) -> Prompt:
    is_partial = messages[-1]["role"] == "assistant"
    ids = tokenizer.apply_chat_template(
        list(messages),
        tools=list(tools) or None,
        add_generation_prompt=not is_partial,
        continue_final_message=is_partial,
        return_dict=False,
    )
    return Prompt(id="p", messages=messages, token_ids=tuple(ids), env_class=f"tests-begun-{env}", tools=tuple(tools))


START = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nIt is"
AGAIN = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("env", "config", "start"),
    [
        ("notes", {}, START),
        ("notes", {"use_conversation_multi_turn": False}, START),
        ("notes", {"step_wise_trajectories": True}, START),
        ("briefed", {}, "<|im_start|>system\nBe short.<|im_end|>\n" + START),
    ],
    ids=["messages", "one message", "whole history", "changed by the environment"],
)
async def test_a_begun_answer_is_continued_and_judged_as_a_whole(env: str, config: Any, start: str) -> None:
    engine = Says(TOKENIZER, [" 2.<|im_end|>", "Yes.<|im_end|>"])
    (group,) = await play(generator(engine, TOKENIZER, **config), prompt(env, ASKED, BEGUN))
    assert seen == [(ASKED,), "It is 2.", "Yes."]
    first, second = (TOKENIZER.decode(request.prompt_ids) for request in engine.requests)
    assert first == start
    between = "Sure?" if "use_conversation_multi_turn" in config else AGAIN
    assert second == f"{start} 2.{between}"
    (row,) = group.trajectories
    steps = [
        TOKENIZER.decode([t for t, m in zip(s.response_ids, s.loss_mask, strict=True) if m]) for s in row.token_rows
    ]
    assert "It is" not in "".join(steps), "what the row has begun is not trained on"


async def test_a_begun_answer_is_continued_under_a_template_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML.replace("<|im_start|>", "<|im_start|>*"), encoding="utf-8")
    engine = Says(TOKENIZER, [" 2.<|im_end|>", "Yes.<|im_end|>"])
    named = ChatTemplateConfig(source="file", name_or_path=str(file))
    await play(generator(engine, TOKENIZER, chat_template=named), prompt("notes", ASKED, BEGUN))
    assert TOKENIZER.decode(engine.requests[0].prompt_ids) == START.replace("<|im_start|>", "<|im_start|>*")


GROUP = """
from skyrl.envs import group_reward

@group_reward
def both(completions, prompts, **columns):
    assert [prompt[-1]["role"] for prompt in prompts] == ["user", "user"]
    return [float(completion == [{"role": "assistant", "content": "It is 2."}]) for completion in completions]

def one(completions, prompts, **columns):
    return both(completions * 2, prompts * 2)[:1]
"""


@pytest.mark.parametrize("function", ["both", "one"])
async def test_a_reward_of_the_form_of_trl_is_given_the_whole_answer(tmp_path: Path, function: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(GROUP, encoding="utf-8")
    engine = Says(TOKENIZER, [" 2.<|im_end|>"], [" 3.<|im_end|>"])
    gym_generator = generator(engine, TOKENIZER, max_turns=1)
    gym_generator._user_env_class = f"{file}:{function}"
    row = prompt("notes", ASKED, BEGUN)
    row = Prompt(id="p", messages=row.messages, token_ids=row.token_ids, env_class=f"{file}:{function}")
    (group,) = await play(gym_generator, row, samples=2)
    assert group.rewards == (1.0, 0.0)


async def test_tools_of_a_row_stand_beside_those_of_its_environment() -> None:
    engine = Says(TOKENIZER, ["2"])
    mul = {"type": "function", "function": {"name": "mul", "description": "the row's"}}
    await play(generator(engine, TOKENIZER), prompt("multiplies", ASKED, tools=(mul, ADD)))
    text = TOKENIZER.decode(engine.requests[0].prompt_ids)
    assert (text.count('"mul"'), text.count('"add"')) == (1, 1)
    assert "Multiply." in text and "the row's" not in text  # the environment runs it, so its description counts


PICKY = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m['role'] in ('user', 'assistant', 'system') %}"
)


@pytest.mark.parametrize("config", [{}, {"step_wise_trajectories": True}])
async def test_a_reply_that_the_template_passes_over_ends_the_run_with_a_reason(config: Any) -> None:
    tokenizer = chat_tokenizer(PICKY)
    engine = Says(tokenizer, ["a<|im_end|>", "b<|im_end|>"])
    with pytest.raises(DataError, match="leaves out the content of a message of narrator .'Sure.'.: use a role that"):
        await play(generator(engine, tokenizer, **config), prompt("mutters", ASKED, tokenizer=tokenizer))


async def test_an_environment_whose_messages_the_template_passes_over_ends_the_run_with_a_reason() -> None:
    tokenizer = chat_tokenizer(PICKY.replace(", 'system'", ""))
    with pytest.raises(DataError, match="leaves out the content of a message of system .'Be short.'"):
        await play(generator(Says(tokenizer, ["a"]), tokenizer), prompt("briefed", ASKED, tokenizer=tokenizer))


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
async def test_a_request_with_a_message_that_the_template_passes_over_is_refused(role: str) -> None:
    script = Script(["4"])
    script.tokenizer.chat_template = PICKY.replace(", 'system'", "")
    body = {"model": "tiny", "messages": [{"role": role, "content": "Be short."}, ASKED]}
    async with served(script.generate, script.tokenizer) as server, httpx.AsyncClient(base_url=server.url) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "leaves out the content of a message of" in answer.json()["error"]["message"]
    assert script.requests == []
