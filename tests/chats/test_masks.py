"""What is learned of a chat is what a model would have sampled: over published families of chat formats."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from skyrl.chats.masks import ChatMasks
from skyrl.chats.spans import AddedTokens
from skyrl.chats.text import chat_text
from skyrl.errors import DataError
from tests.chats.corpus import NAMES, tokenizer_of
from tests.rollout.chats import chat_tokenizer
from tests.rollout.families import FAMILIES

CHAT = (
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": "two é"},
)
SAID = {
    "llama 2": (" one </s>", " two é </s>"),
    "mistral": (" one</s>", " two é</s>"),
    "vicuna": (" one</s>", " two é</s>"),
    "jamba 1.5": (" one<|eom|>", " two é<|eom|>"),
    "glm 4.5": ("\none<|user|>", "\ntwo é<|im_end|>"),  # as for glm 4, an end of the sequence ends the last turn
    "harmony": ("<|channel|>final<|message|>one<|end|>", "<|channel|>final<|message|>two é<|end|>"),
}
"""What the header that asks for an answer leaves to the answer, a space or a channel, is sampled, too."""


def family_tokenizer(name: str) -> Any:
    return chat_tokenizer(FAMILIES[name].template, FAMILIES[name].special)


def learned(tokenizer: Any, ids: Any, mask: Any) -> list[str]:
    """The text of each learned stretch."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [tokenizer.decode(ids[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def expected(name: str) -> tuple[str, str]:
    first, last = SAID.get(name, (f"one{FAMILIES[name].end}", f"two é{FAMILIES[name].end}"))
    if name == "qwen 3":
        last = "<think>\n\n</think>\n\n" + last  # its earlier answers lose that, so that they cannot be learned
    if name == "glm 4":
        last = "two é<|im_end|>"  # nothing of the template ends the last turn: the end of a sequence does
    return first, last


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen 3"])
def test_every_answer_is_learned_with_the_token_that_ends_it_and_nothing_else(name: str) -> None:
    tokenizer = family_tokenizer(name)
    ids, mask = ChatMasks(tokenizer, all_messages=True)(CHAT)
    assert learned(tokenizer, ids, mask) == list(expected(name))
    rendered = tokenizer.apply_chat_template(list(CHAT), tokenize=False)
    assert tokenizer.decode(ids).startswith(rendered)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_answer_alone_follows_the_very_tokens_that_would_ask_for_it(name: str) -> None:
    tokenizer = family_tokenizer(name)
    ids, mask = ChatMasks(tokenizer)(CHAT)
    assert learned(tokenizer, ids, mask) == [expected(name)[1]]
    rendered = tokenizer.apply_chat_template(list(CHAT[:3]), add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(rendered, add_special_tokens=False)
    if name != "deepseek r1":  # whose header opens a thought, and whose template writes none in an answer
        assert ids[: int(mask.argmax())].tolist() == prompt


def test_a_turn_that_calls_a_tool_is_learned_with_its_call() -> None:
    template = (
        "{% for t in tools or [] %}{{ t }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = chat_tokenizer(template)
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "look", "tool_calls": [{"name": "find"}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    ids, mask = ChatMasks(tokenizer, all_messages=True)(chat, [{"name": "find"}])
    assert learned(tokenizer, ids, mask) == ["look<call>find</call><|im_end|>", "4<|im_end|>"]
    assert tokenizer.decode(ids).startswith("{'name': 'find'}<|im_start|>user")


def test_what_follows_the_last_answer_is_left_out() -> None:
    tokenizer = family_tokenizer("chatml")
    longer, _ = ChatMasks(tokenizer)([*CHAT, {"role": "user", "content": "c?"}])
    assert longer.tolist() == ChatMasks(tokenizer)(CHAT)[0].tolist()


def test_a_chat_without_an_answer_and_a_template_that_hides_it_are_refused() -> None:
    with pytest.raises(DataError, match=r"no message is from the assistant \(roles: user\)"):
        ChatMasks(family_tokenizer("chatml"))(CHAT[:1])
    hiding = chat_tokenizer("{% for m in messages %}{{ m['content']|length }}{% endfor %}")
    with pytest.raises(DataError, match="does not show where an answer is"):
        ChatMasks(hiding)(CHAT)


@pytest.mark.parametrize("text", ["skyrl-answer-5e0f", "a skyrl-answer-5e0f b", "skyrl-text-5e0f-0-"])
def test_a_question_that_spells_a_placeholder_is_read_like_any_other(text: str) -> None:
    """A placeholder finds an answer that does not follow the generation prompt."""
    outcomes = []
    for name in sorted(FAMILIES):
        tokenizer = family_tokenizer(name)
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "one"}]
        for content in ("?", text):
            chat[0]["content"] = content
            try:
                outcomes.append(learned(tokenizer, *ChatMasks(tokenizer)(chat)))
            except DataError as error:
                outcomes.append([str(error).replace(text, "?")])
    assert outcomes[::2] == outcomes[1::2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", dict.fromkeys([*FAMILIES, *NAMES]))
def test_the_header_that_asks_for_an_answer_is_never_learned(name: str) -> None:
    tokenizer = family_tokenizer(name) if name in FAMILIES else tokenizer_of(name)
    names = {"s": "system", "u": "user", "a": "assistant"}
    added = AddedTokens.of(tokenizer)
    for roles in ("uau", "uaa", "uaaua", "uaaa", "uauaa", "suaaua"):
        chat = [{"role": names[role], "content": f"word{index}"} for index, role in enumerate(roles)]
        if roles == "uau":
            with_prompt, without_prompt = (
                chat_text(tokenizer, chat[:1], generation_prompt=flag) for flag in (True, False)
            )
            header = added.leading(with_prompt.removeprefix(without_prompt).strip())
            question = added.leading(chat_text(tokenizer, chat, generation_prompt=False).partition("word1")[2])
            continue
        try:
            stretches = learned(tokenizer, *ChatMasks(tokenizer, all_messages=True)(chat))
        except DataError:
            continue  # a template may refuse two answers in a row
        assert header in ("", question) or header not in "".join(stretches)
        contents = [f"word{index}" for index, role in enumerate(roles) if role == "a"]
        assert re.findall(r"word\d", "".join(stretches)) == contents
