"""The learned text holds what a message says and what ends its turn; what a template does otherwise is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl.chats.continuation import FIXED
from skyrl.chats.examples import ADD, assistant, call, result, user
from skyrl.chats.masks import ChatMasks
from skyrl.chats.rendering import Template
from skyrl.chats.spans import ANSWER
from skyrl.errors import DataError
from tests.chats.corpus import tokenizer_of
from tests.rollout.chats import CHATML, chat_tokenizer
from tests.rollout.families import FAMILIES

TOOLS = (ADD,)
THOUGHTS = "<think>\nTwo and two.\n</think>\n\nFour."


def learned(tokenizer: Any, *chat: dict[str, Any], tools: Any = None, **settings: Any) -> str:
    """The text of the learned tokens."""
    allow = settings.pop("allow_dropped", False)
    ids, mask = ChatMasks(tokenizer, **settings)(chat, tools, allow_dropped=allow)
    return str(tokenizer.decode(ids[mask]))


def test_thoughts_are_learned_behind_a_header_that_opens_them_although_the_template_strips_them() -> None:
    text = learned(tokenizer_of("deepseek-r1"), user("2+2?"), assistant(THOUGHTS))
    assert text == "Two and two.\n</think>\n\nFour.<|end_of_sentence|>"


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.5", "nemotron-3", "deepseek-r1", "gpt-oss"])
def test_inline_thoughts_of_the_last_answer_and_those_of_a_field_are_learned_alike(name: str) -> None:
    inline = learned(tokenizer_of(name), user("2+2?"), assistant(THOUGHTS))
    field = learned(tokenizer_of(name), user("2+2?"), assistant("Four.", reasoning_content="Two and two."))
    assert inline == field and "Two and two." in inline and "Four." in inline


def test_thoughts_that_the_template_does_not_write_are_refused_by_name_or_used_without() -> None:
    chat = (user("2+2?"), assistant("Four.", reasoning_content="Two and two."))
    with pytest.raises(DataError, match="leaves out the thoughts .'Two and two.'.: .*allow_dropped_content"):
        learned(tokenizer_of("chatml"), *chat)
    assert learned(tokenizer_of("chatml"), *chat, allow_dropped=True) == "Four.<|im_end|>"


def test_a_call_is_learned_where_nothing_special_follows_it() -> None:
    text = learned(tokenizer_of("glm-4.5"), user("2+2?"), assistant("", tool_calls=[call(a=2, b=2)]), tools=TOOLS)
    assert text.startswith("\n<think></think>\n<tool_call>add\n<arg_key>a") and text.endswith("</tool_call><|im_end|>")


def test_the_turn_is_learned_to_its_end_and_not_to_the_first_special_token() -> None:
    text = learned(tokenizer_of("command-r7b"), user("2+2?"), assistant("Four."))
    assert text == "<|START_RESPONSE|>Four.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"


def test_a_call_between_special_tokens_is_learned_with_its_body() -> None:
    text = learned(tokenizer_of("lfm2.5"), user("2+2?"), assistant("", tool_calls=[call(a=2, b=2)]), tools=TOOLS)
    assert text == "<|tool_call_start|>[add(a=2, b=2)]<|tool_call_end|><|im_end|>"


def test_an_end_of_turn_that_is_no_special_token_is_learned() -> None:
    tokenizer = chat_tokenizer(CHATML.replace("im_end", "turn_end"))
    tokenizer.add_tokens([AddedToken("<|turn_end|>", special=False)])
    assert learned(tokenizer, user("a?"), assistant("b")) == "b<|turn_end|>"
    assert ChatMasks(tokenizer).turn_end == ("<|turn_end|>", tokenizer.convert_tokens_to_ids("<|turn_end|>"))


def test_what_ends_the_conversation_and_not_the_turn_is_not_learned() -> None:
    assert learned(tokenizer_of("phi-3.5"), user("2+2?"), assistant("Four.")) == "Four.<|end|>"


@pytest.mark.parametrize("name", ["chatml", "deepseek-r1", "gpt-oss", "qwen3", "llama-3.1"])
def test_arguments_are_written_the_same_whether_they_are_an_object_or_its_text(name: str) -> None:
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    both = [
        learned(tokenizer_of(name), user("2+2?"), assistant(None, tool_calls=[tool_call]), tools=TOOLS)
        for tool_call in (call(a=2, b=2), as_text)
    ]
    assert both[0] == both[1] and '{"a": 2, "b": 2}' in both[0] and "None" not in both[0]


def test_arguments_are_never_written_as_python_writes_them() -> None:
    tokenizer = chat_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = (user("?"), assistant("", tool_calls=[call(city="Paris")]))
    assert learned(tokenizer, *chat) == 'add{"city": "Paris"}<|im_end|>'


@pytest.mark.parametrize(
    ("name", "chat", "tools", "omitted"),
    [
        ("phi-3.5", (user("?"), assistant("", tool_calls=[call(a=2)])), TOOLS, "the call of add, the tool add"),
        ("phi 3", (user("?"), assistant("x"), result("4"), assistant("y")), TOOLS, "the tool add"),
        ("phi-3.5", (user("?"), assistant("x")), TOOLS, "the tool add"),
    ],
)
def test_what_a_template_leaves_out_is_named(name: str, chat: Any, tools: Any, omitted: str) -> None:
    with pytest.raises(DataError, match=f"the chat template leaves out {omitted}"):
        learned(tokenizer_of(name), *chat, tools=tools)


def test_a_result_that_a_template_leaves_out_is_named() -> None:
    silent = chat_tokenizer(CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"))
    with pytest.raises(DataError, match="leaves out the content of a message of tool .'41'."):
        learned(silent, user("?"), assistant("x"), result("41"), assistant("y"))


@pytest.mark.parametrize(
    ("name", "kept"),
    [("qwen3", "think"), ("qwen3.5", "think"), ("gpt-oss", "return"), ("qwen 3", "think")],
)
def test_earlier_answers_that_are_written_otherwise_afterwards_are_refused_by_name(name: str, kept: str) -> None:
    chat = (user("a?"), assistant("one"), user("b?"), assistant("two"))
    with pytest.raises(DataError, match="writes message 1 differently once the conversation continues: .*" + kept):
        learned(tokenizer_of(name), *chat, all_messages=True)
    assert "two" in learned(tokenizer_of(name), *chat)


def test_a_history_that_the_model_would_not_have_seen_is_refused() -> None:
    """The system message stands in the last question, so that the first answer was not sampled from what is there."""
    chat = ({"role": "system", "content": "Be short."}, user("a?"), assistant("one"), user("b?"), assistant("two"))
    with pytest.raises(DataError, match="writes message 2 differently"):
        learned(tokenizer_of("mistral-small"), *chat, all_messages=True)


def test_template_arguments_are_those_of_sampling() -> None:
    chat = (user("2+2?"), assistant("Four."))
    ids, mask = ChatMasks(tokenizer_of("qwen3.5"), arguments={"enable_thinking": False})(chat)
    assert tokenizer_of("qwen3.5").decode(ids[mask]) == "Four.<|im_end|>"


def test_an_answer_without_the_thought_that_the_header_opens_is_counted() -> None:
    chat = (user("2+2?"), assistant("Four."))
    counts = {}
    for name, arguments in (
        ("nemotron-3", {}),
        ("nemotron-3", {"enable_thinking": False}),
        ("qwen3.5", {}),
        ("chatml", {}),
    ):
        masks = ChatMasks(tokenizer_of(name), arguments=arguments)
        masks(chat)
        counts[name, *arguments] = masks.behind_other_headers
    assert counts == {("nemotron-3",): 1, ("nemotron-3", "enable_thinking"): 0, ("qwen3.5",): 0, ("chatml",): 0}


def test_an_empty_thought_is_ended_behind_a_header_that_opens_it() -> None:
    text = learned(tokenizer_of("deepseek-r1"), user("2+2?"), assistant("<think>\n\n</think>\n\nFour."))
    assert text == "</think>\n\nFour.<|end_of_sentence|>"


def test_thoughts_of_earlier_answers_stay_where_the_template_keeps_them() -> None:
    chat = (user("2+2?"), assistant(THOUGHTS), user("Sure?"), assistant("Yes."))
    for name, kept in (("chatml", True), ("qwen3", False), ("lfm2.5", True), ("deepseek-r1", False)):
        masks = ChatMasks(tokenizer_of(name))
        for _ in range(2):  # the spelling that was found is taken again
            ids, mask = masks(chat)
            assert ("Two and two." in tokenizer_of(name).decode(ids)) == kept
            assert "Yes." in tokenizer_of(name).decode(ids[mask])


def test_a_weight_says_which_messages_are_learned() -> None:
    chat = (user("a?"), assistant("one", weight=1), user("b?"), assistant("two", weight=0))
    assert learned(tokenizer_of("chatml"), *chat) == "one<|im_end|>"
    assert learned(tokenizer_of("chatml"), *chat, all_messages=True) == "one<|im_end|>"
    for wrong in (-0.5, float("nan"), float("inf"), "much", 1e-9):
        with pytest.raises(DataError, match=f"the weight of a message is {wrong!r}"):
            learned(tokenizer_of("chatml"), user("a?"), assistant("one", weight=wrong))
    with pytest.raises(DataError, match="the weight of every assistant message is 0"):
        learned(tokenizer_of("chatml"), user("a?"), assistant("one", weight=0))


def test_every_token_of_a_message_with_its_end_has_the_weight_of_the_message() -> None:
    tokenizer = tokenizer_of("chatml")
    chat = (user("a?"), assistant("one", weight=0.25), user("b?"), assistant("two", weight=3))
    ids, weights = ChatMasks(tokenizer).weighted(chat)
    texts = {weight: tokenizer.decode(ids[weights == weight]) for weight in set(weights.tolist()) - {0.0}}
    assert texts == {0.25: "one<|im_end|>", 3.0: "two<|im_end|>"}


def test_text_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        learned(tokenizer_of("chatml"), user("a?"), assistant("\ud800"))


def test_a_template_that_ends_no_turn_teaches_the_last_answer_alone() -> None:
    plain = chat_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    chat = (user("a?"), assistant("one"), user("b?"), assistant("two"))
    with pytest.raises(DataError, match="writes nothing that ends message 1"):
        learned(plain, *chat, all_messages=True)
    assert learned(plain, *chat).endswith("two<|im_end|>")


class Counts:
    """A tokenizer that counts the characters that it writes and reads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.written, self.read = tokenizer, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, **options)
        self.written += len(text)
        return text

    def encode(self, text: str, **options: Any) -> list[int]:
        self.read += len(text)
        ids: list[int] = self._tokenizer.encode(text, **options)
        return ids


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["chatml", "llama-3.1", "glm-4.5", "lfm2.5"])
@pytest.mark.parametrize("loop", [False, True])
def test_twice_as_many_turns_are_twice_the_work(name: str, loop: bool) -> None:
    """Characters written by the template and read by the tokenizer, for 50 and for 100 turns."""
    work = []
    for turns in (50, 100):
        counts: Any = Counts(tokenizer_of(name))
        if loop:
            turn = (assistant("", tool_calls=[call(a=2, b=2)]), result("four"))
            chat = [user("2+2?"), *turn * turns, assistant("Four.")]
        else:
            chat = [user("2+2?"), assistant("Four.")] * turns
        ids, mask = ChatMasks(counts, all_messages=True)(chat, TOOLS if loop else None)
        assert tokenizer_of(name).decode(ids[mask]).count("add" if loop else "Four.") == turns
        work.append(counts.written + counts.read)
    assert work[1] / work[0] <= 2.2


def with_sentencepiece(template: str, *, legacy: bool) -> Any:
    """A tokenizer of letters that puts a space before every text, as those of Llama 2 and of Mistral do."""
    letters = [chr(code) for code in range(33, 127)] + ["\N{LOWER ONE EIGHTH BLOCK}", "\n"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    if legacy:
        space = normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("\N{LOWER ONE EIGHTH BLOCK}"), space])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", chat_template=template)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("name", ["zephyr", "mistral", "llama 2", "alpaca"])
async def test_no_space_is_put_before_a_text_in_the_middle_of_a_conversation(name: str, legacy: bool) -> None:
    """Letters of the whole text, and of a rollout that sampled the answers: none has a space of the tokenizer's own."""
    tokenizer = with_sentencepiece(FAMILIES[name].template, legacy=legacy)
    chat = [user("a?"), assistant("one"), user("b?"), assistant("two")]
    ids, mask = ChatMasks(tokenizer, all_messages=True)(chat)
    expected = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)
    assert ids.tolist() == expected
    first, second = (int(edge) for edge in np.flatnonzero(np.diff(mask.astype(int)) == 1) + 1)
    ends = [int(edge) + 1 for edge in np.flatnonzero(np.diff([*mask.astype(int), 0]) == -1)]
    template = Template(tokenizer=tokenizer, arguments={})
    between = template.tokens_after(FIXED, ANSWER, [user("b?")])
    assert between is not None and list(between[-(second - ends[0]) :]) == ids[ends[0] : second].tolist()
    assert template.start(chat[:1]) == tuple(ids[:first].tolist())
