"""Conversations that the template renders again for each turn: what is trained on is what was sampled, where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.config import ChatTemplateConfig
from skyrl.envs import register
from skyrl.models.files.chat_templates import BUILT_IN
from skyrl.trajectory import Trajectory
from tests.rollout.chats import CHATML, Counts, Says, chat_tokenizer, generator, play, prompt
from tests.rollout.families import FAMILIES

TOKENIZER = chat_tokenizer()
THOUGHTS = [f"<think>\nhm {n}\n</think>\n\n{answer}<|im_end|>" for n, answer in enumerate("abc")]

register("tests-history", Counts)


def named(name: str) -> ChatTemplateConfig:
    return ChatTemplateConfig(name_or_path=name)


async def one(turns: list[str], tokenizer: Any = TOKENIZER, **config: Any) -> tuple[Trajectory, Says]:
    engine = Says(tokenizer, turns, stop_reason=config.pop("stop_reason", "stop"))
    (group,) = await play(generator(engine, tokenizer, **config), prompt(tokenizer, "tests-history"))
    (trajectory,) = group.trajectories
    return trajectory, engine


def assert_exact(trajectory: Trajectory, engine: Says, turns: list[str], tokenizer: Any = TOKENIZER) -> None:
    """Every turn is in some row, behind exactly what it was sampled from, and nothing else is trained on."""
    trained = [t for s in trajectory.token_rows for t, mask in zip(s.response_ids, s.loss_mask, strict=True) if mask]
    assert trained == [token for text in turns for token in engine.completion(text).token_ids]
    rows = [step.prompt_ids + step.response_ids for step in trajectory.token_rows]
    for request, text in zip(engine.requests, turns, strict=True):
        sampled = request.prompt_ids + engine.completion(text).token_ids
        assert any(row[: len(sampled)] == sampled for row in rows)


async def test_a_template_that_leaves_thoughts_out_begins_a_row_at_each_turn() -> None:
    trajectory, engine = await one(THOUGHTS, chat_template=named("qwen3_without_thinking"))
    assert len(trajectory.token_rows) == 3
    assert TOKENIZER.decode(trajectory.prompt_ids) == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        f"<|im_start|>user\nsaw {THOUGHTS[0].removesuffix('<|im_end|>')}<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n"
        f"<|im_start|>user\nsaw {THOUGHTS[1].removesuffix('<|im_end|>')}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert_exact(trajectory, engine, THOUGHTS)
    assert trajectory.reward == 1.0 + 2.0 + 3.0
    assert [[turn.reward for turn in step.rewards] for step in trajectory.token_rows] == [[1.0], [2.0], [3.0]]


async def test_a_template_that_keeps_thoughts_goes_on_in_one_row() -> None:
    trajectory, engine = await one(THOUGHTS, chat_template=named("qwen3_with_thinking"))
    assert trajectory.earlier == ()
    assert_exact(trajectory, engine, THOUGHTS)
    ours, _ = await one(THOUGHTS)
    assert trajectory.response_ids == ours.response_ids  # as the tokens before are continued


async def test_each_step_is_a_row_and_steps_that_go_on_are_merged() -> None:
    answers = ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]
    apart, engine = await one(answers, step_wise_trajectories=True)
    assert len(apart.token_rows) == 3
    assert_exact(apart, engine, answers)
    merged, engine = await one(answers, step_wise_trajectories=True, merge_stepwise_output=True)
    assert len(merged.token_rows) == 1
    assert_exact(merged, engine, answers)
    assert merged.reward == apart.reward == 6.0


@pytest.mark.parametrize("name", FAMILIES)
async def test_steps_are_exact_in_every_published_format(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = chat_tokenizer(family.template, family.special)
    turns = [answer + family.end for answer in ("<think>\nhm\n</think>\n\nlook", "so 4?", "yes é")]
    for merge in (False, True):
        trajectory, engine = await one(turns, tokenizer, step_wise_trajectories=True, merge_stepwise_output=merge)
        assert_exact(trajectory, engine, turns, tokenizer)
        assert len(trajectory.token_rows) == 3 or merge


async def test_every_row_of_an_unfinished_answer_can_be_left_out_or_denied_its_reward() -> None:
    filtered, _ = await one(THOUGHTS, stop_reason="length", step_wise_trajectories=True, apply_overlong_filtering=True)
    assert not filtered.trained
    denied, _ = await one(THOUGHTS, stop_reason="length", step_wise_trajectories=True, zero_reward_on_non_stop=True)
    assert (denied.reward, denied.trained) == (0.0, True)


async def test_a_history_that_grew_too_long_ends_with_the_turn_before() -> None:
    short = len(prompt(TOKENIZER, "tests-history").token_ids) + 60
    trajectory, engine = await one(
        ["a<|im_end|>", "b" * 30 + "<|im_end|>", "c<|im_end|>"], step_wise_trajectories=True, max_input_length=short
    )
    assert trajectory.stop_reason == "context"
    assert len(engine.requests) == len(trajectory.token_rows) == 2
    assert trajectory.reward == 3.0


async def test_a_template_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}"), encoding="utf-8")
    trajectory, engine = await one(
        ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"],
        chat_template=ChatTemplateConfig(source="file", name_or_path=str(file)),
    )
    assert "GO<|im_end|>" in TOKENIZER.decode(engine.requests[0].prompt_ids)
    assert len(trajectory.token_rows) == 3  # what was sampled in small letters is written in capitals
    assert_exact(trajectory, engine, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])


async def test_one_assistant_message_keeps_its_tokens_under_a_template_of_ones_own() -> None:
    trajectory, _ = await one(
        THOUGHTS, chat_template=named("qwen3_without_thinking"), use_conversation_multi_turn=False
    )
    assert trajectory.earlier == ()


def test_thinking_can_be_switched_off_in_the_built_in_templates() -> None:
    for text in BUILT_IN.values():
        tokenizer = chat_tokenizer(text)
        messages = [{"role": "user", "content": "?"}]
        rendered_chat = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert rendered_chat == "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
