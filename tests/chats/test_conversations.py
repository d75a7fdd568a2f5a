"""Laws over families: what is learned is said by the learned message alone, and is what a rollout would train on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from skyrl.chats.examples import ADD, assistant, call, result, user
from skyrl.chats.masks import ChatMasks
from skyrl.envs import Env, EnvStep, register
from skyrl.errors import DataError
from tests.chats.corpus import NAMES, tokenizer_of
from tests.rollout.chats import Says, generator, play, prompt


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Questions, answers, calls and results, each of words that no other message has."""
    numbers = iter(range(1000))

    def words() -> str:
        return " ".join(f"w{next(numbers)}{rng.choice(['', 'é', '.', ' 東', '🙂', ' <b>', ' {x}'])}," for _ in range(3))

    chat = [{"role": "system", "content": words()}] if rng.random() < 0.3 else []
    for turn in range(rng.randint(1, 4)):
        chat.append(user(words()))
        if rng.random() < 0.4:
            chat += [assistant("", tool_calls=[call(turn + 1, a=words())]), result(words())]
        thought = f"<think>\n{words()}\n</think>\n\n" if rng.random() < 0.3 else ""
        chat.append(assistant(thought + words()))
    return chat


def numbered(text: str) -> set[str]:
    """Numbers of the words of a text."""
    return {"".join(filter(str.isdigit, word[:3])) for word in text.split("w")[1:] if word[:1].isdigit()}


def check(name: str, chat: list[dict[str, Any]], *, every: bool) -> bool:
    """Whether the template takes the conversation; then the learned text of each message is its own, and all of it."""
    tokenizer = tokenizer_of(name)
    tools = (ADD,) if any(message.get("tool_calls") for message in chat) else None
    try:
        ids, mask = ChatMasks(tokenizer, all_messages=every)(chat, tools)
    except DataError:
        return False
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    stretches = [tokenizer.decode(ids[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    answers = [message for message in chat if message["role"] == "assistant"]
    for text, message in zip(stretches, answers if every else answers[-1:], strict=True):
        assert numbered(text) == numbered(str(message))
    everything = numbered(tokenizer.decode(ids))
    assert all(numbered(str(message)) <= everything for message in chat if message["role"] != "assistant")
    return True


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", NAMES)
def test_random_conversations_are_learned_in_full_or_refused(name: str) -> None:
    accepted = [check(name, conversation(random.Random(seed)), every=bool(seed % 2)) for seed in range(12)]
    assert any(accepted)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_five_hundred_random_conversations_are_learned_in_full_or_refused(name: str) -> None:
    accepted = [check(name, conversation(random.Random(seed)), every=bool(seed % 2)) for seed in range(500)]
    assert sum(accepted) >= 50


class Asks(Env):
    """Puts one more question."""

    def __init__(self, extras: Any) -> None:
        super().__init__(extras)
        self.asked = False

    def step(self, action: str) -> EnvStep:
        done, self.asked = self.asked, True
        return EnvStep(reward=1.0, done=done, observations=() if done else (user("b?"),))


register("tests-asks", Asks)

OTHERWISE = {
    "deepseek r1": "the header opens a thought, and the history has no header",
    "deepseek-r1": "the header opens a thought, and the history has no header",
    "qwen3": "the last answer alone gets an empty thought",
    "qwen 3": "the last answer alone gets an empty thought",
    "qwen3.5": "answers behind the last question alone get an empty thought",
    "nemotron-3": "the header opens a thought, and the history has an empty one",
    "gpt-oss": "an answer ends otherwise once it is history",
}
"""Families whose conversations of two answers cannot be learned in one row, or not from the tokens of sampling."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERWISE])
async def test_a_chat_has_the_tokens_and_the_mask_of_a_rollout_that_sampled_its_answers(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ids, mask = ChatMasks(tokenizer, all_messages=True)([user("a?"), assistant("one é"), user("b?"), assistant("two")])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    sampled = [tokenizer.decode(ids[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    engine = Says(tokenizer, sampled)
    (group,) = await play(generator(engine, tokenizer), prompt(tokenizer, "tests-asks", "a?"))
    (row,) = group.trajectories
    assert [*row.prompt_ids, *row.response_ids] == ids[: edges[-1]].tolist()
    assert [False] * len(row.prompt_ids) + [bool(value) for value in row.loss_mask] == mask[: edges[-1]].tolist()
