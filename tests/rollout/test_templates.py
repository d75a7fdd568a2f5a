"""Token exactness over published families of chat formats, and what the checker says of each."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.envs import Env, EnvStep, register
from skyrl.envs.tools import Tool, ToolEnv
from skyrl.rollout.template_check import TOOL, check_template
from tests.chats.corpus import tokenizer_of as shipped
from tests.rollout.chats import Says, chat_tokenizer, generator, play, prompt
from tests.rollout.families import FAMILIES

ANSWERS = ("<think>\nhm\n</think>\n\nlook it up", "so 4?", "yes é 🙂")


class Dialogue(Env):
    """Answers once as a user and once, where the template has such a role, as a tool."""

    def __init__(self, extras: Any) -> None:
        super().__init__(extras)
        self.turns = 0

    def step(self, action: str) -> EnvStep:
        self.turns += 1
        role = ("user", self.extras["second_role"], "")[self.turns - 1]
        observations = ({"role": role, "content": f"turn {self.turns}"},)
        return EnvStep(reward=1.0, done=self.turns == 3, observations=observations if self.turns < 3 else ())


register("tests-dialogue", Dialogue)


WITH_TOOLS = [name for name, family in FAMILIES.items() if family.call != "refused"]
"""Whose templates show what may be called."""


def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    return chat_tokenizer(family.template, family.special)


@pytest.mark.parametrize("name", FAMILIES)
async def test_what_is_trained_on_is_what_was_sampled_and_nothing_else(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    role = "user" if check_template(tokenizer)[2].outcome == "refused" else "tool"
    engine = Says(tokenizer, [answer + family.end for answer in ANSWERS])
    (group,) = await play(generator(engine, tokenizer), prompt(tokenizer, "tests-dialogue", second_role=role))
    (row,) = group.trajectories
    sampled = [engine.completion(answer + family.end) for answer in ANSWERS]
    trained = [token for token, mask in zip(row.response_ids, row.loss_mask, strict=True) if mask]
    assert trained == [token for completion in sampled for token in completion.token_ids]
    tokens = row.prompt_ids + row.response_ids
    for request, completion in zip(engine.requests, sampled, strict=True):
        start = len(request.prompt_ids)
        assert tokens[: start + len(completion.token_ids)] == request.prompt_ids + completion.token_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_the_checker_says_which_formats_change_what_was_said(name: str) -> None:
    verdict = check_template(tokenizer_of(name))[0]
    assert verdict.outcome == FAMILIES[name].outcome
    assert (verdict.turn_by_turn != verdict.as_a_whole) == (verdict.outcome == "differs")


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.outcome == "stable"])
async def test_a_stable_conversation_is_what_the_template_writes_of_the_whole(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    engine = Says(tokenizer, [answer + family.end for answer in ("a", "b", "c")])
    (group,) = await play(generator(engine, tokenizer), prompt(tokenizer, "tests-dialogue", second_role="user"))
    (row,) = group.trajectories
    messages = [("user", "go"), ("assistant", "a"), ("user", "turn 1"), ("assistant", "b"), ("user", "turn 2")]
    full_text = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in [*messages, ("assistant", "c")]], tokenize=False
    )
    ours = tokenizer.decode(row.prompt_ids + row.response_ids, skip_special_tokens=False)
    assert (full_text + family.end).startswith(ours.removesuffix(family.end))


def test_there_are_as_many_formats_with_tools_as_promised() -> None:
    assert len(WITH_TOOLS) >= 12
    assert len(FAMILIES) >= 12


@pytest.mark.parametrize("name", FAMILIES)
def test_the_checker_says_which_formats_change_a_call_of_a_tool(name: str) -> None:
    verdict = check_template(tokenizer_of(name))[3]
    assert verdict.outcome == FAMILIES[name].call, (verdict.turn_by_turn, verdict.as_a_whole)
    assert (verdict.outcome != "refused") or "the chat template leaves out the tool add" in verdict.as_a_whole


class Sums(ToolEnv):
    tools = (Tool(name="add", description="Add.", parameters=TOOL["function"]["parameters"], run=lambda a, b: a + b),)

    def judge(self, answer: str) -> EnvStep:
        observations = ({"role": "user", "content": "Are you sure?"},)
        return EnvStep(reward=1.0, done=answer == "4", observations=() if answer == "4" else observations)


register("tests-sums", Sums)


@pytest.mark.parametrize("name", WITH_TOOLS)
async def test_dialogues_with_tools_train_on_what_was_sampled_and_nothing_else(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": %s}}</tool_call>'
    turns = [text + family.end for text in (call % 2 + call % 3, call % '"two"', "é, so 5?", "4")]
    for step_wise in (False, True):
        engine = Says(tokenizer, turns)
        gym_generator = generator(engine, tokenizer, step_wise_trajectories=step_wise)
        (group,) = await play(gym_generator, prompt(tokenizer, "tests-sums"))
        (row,) = group.trajectories
        assert row.metrics["tool_calls"] == 3.0
        sampled = [engine.completion(text).token_ids for text in turns]
        trained = [t for s in row.token_rows for t, mask in zip(s.response_ids, s.loss_mask, strict=True) if mask]
        assert trained == [token for ids in sampled for token in ids]
        rows = [step.prompt_ids + step.response_ids for step in row.token_rows]
        for request, ids in zip(engine.requests, sampled, strict=True):
            tokens = request.prompt_ids + ids
            assert any(row[: len(tokens)] == tokens for row in rows)
            assert '"description": "Add."' in tokenizer.decode(request.prompt_ids)


def test_the_checker_shows_the_first_difference() -> None:
    verdict = check_template(tokenizer_of("mistral"))[0]
    assert "[/INST]Four." in verdict.turn_by_turn
    assert "[/INST] Four." in verdict.as_a_whole


def test_thoughts_that_a_template_leaves_out_are_found() -> None:
    assert {verdict.outcome for verdict in check_template(tokenizer_of("chatml"))} == {"stable"}
    assert check_template(tokenizer_of("gemma"))[2].outcome == "refused"
    assert "Two and two" not in check_template(tokenizer_of("deepseek r1"))[1].as_a_whole


def outcomes(tokenizer: Any) -> dict[str, str]:
    return {verdict.dialogue: verdict.outcome for verdict in check_template(tokenizer)}


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("mistral-small", {"a system message"}),
        ("llama-3.1", {"white space around an answer", "five turns with everything"}),
        ("gemma-3", {"white space around an answer"}),
        ("lfm2.5", {"thoughts in the first turn", "five turns with everything"}),
        ("command-r7b", {"two turns", "five turns", "a system message", "white space around an answer"}),
    ],
)
def test_the_checker_finds_moved_system_messages_and_trimmed_answers(name: str, differs: set[str]) -> None:
    results = outcomes(shipped(name))
    assert {dialogue for dialogue in differs if results[dialogue] != "differs"} == set(), results


def test_the_checker_finds_what_is_rewritten_from_the_third_turn() -> None:
    """A template that keeps the last two answers alone."""
    forgets = (
        "{% set answers = messages | selectattr('role', 'equalto', 'assistant') | list %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '' if m in answers[:-2] else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    results = outcomes(chat_tokenizer(forgets))
    assert (results["two turns"], results["five turns"]) == ("stable", "differs")


def test_the_checker_finds_a_system_message_that_moves_into_the_last_question() -> None:
    moves = (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
        "{{ system + ' ' if system and m is sameas asked[-1] else '' }}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    results = outcomes(chat_tokenizer(moves))
    assert (results["two turns"], results["five turns"], results["a system message"]) == ("stable", "stable", "differs")
