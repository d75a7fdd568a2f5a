"""Nothing of a prompt is dropped in silence: each part of a row is in the text that is sampled after, or it is bad."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl.chats.contents import dropped, dropped_tools
from skyrl.data.prompts import PromptDataset, load_prompts
from skyrl.errors import DataError
from skyrl.trajectory import Prompt
from tests.chats.corpus import NAMES, tokenizer_of
from tests.rollout.chats import CHATML, chat_tokenizer

PASSES_OVER = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{%- endif %}{%- for m in messages %}{%- if m.role in ('system', 'user') or (m.role == 'assistant' and not "
    "m.tool_calls) %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Writes the roles that it knows and passes over others, as the templates of the Qwen2.5 family do."""

ASKED = {"role": "user", "content": "What is 1+1?"}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 41, "b": 1}}}


def loaded(folder: Path, *rows: Mapping[str, Any], template: str = PASSES_OVER, **options: Any) -> PromptDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = options.pop("tokenizer", None) or chat_tokenizer(template)
    return load_prompts([str(file)], tokenizer, env_class="x", max_prompt_length=10**6, **options)


def text_of(dataset: PromptDataset, template: str = PASSES_OVER) -> str:
    return str(chat_tokenizer(template).decode(dataset.prompts[0].token_ids))


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([{"role": "human", "content": "What is 1+1?"}], "the content of a message of human .'What is 1.1.'"),
        ([{"role": "USER", "content": "What is 1+1?"}], "the content of a message of USER"),
        ([{"role": "developer", "content": "Be short."}, ASKED], "the content of a message of developer"),
        ([{"role": "gpt", "content": "hello"}, ASKED], "the content of a message of gpt"),
        ([ASKED, {"role": "tool", "content": "sunny"}], "the content of a message of tool"),
        ([{"role": "human", "content": "a"}], "the content of a message of human .'a'"),  # in "You are a helpful"
        ([ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, ASKED], "the call of add"),
        ([ASKED, {"role": "assistant", "tool_calls": [CALL]}, ASKED], "the call of add"),
        ([{**ASKED, "name": "Ann"}], "the name of a message of user .'Ann'"),
    ],
)
def test_a_message_that_the_template_passes_over_is_a_bad_row(
    tmp_path: Path, messages: Sequence[Any], part: str
) -> None:
    with pytest.raises(
        DataError, match=f"rows.jsonl, row 0: the chat template leaves out {part}.*allow_dropped_content"
    ):
        loaded(tmp_path, {"prompt": messages})
    rows: list[dict[str, Any]] = [{"prompt": messages}, {"prompt": [ASKED]}]
    assert [prompt.id for prompt in loaded(tmp_path, *rows, skip_bad_rows=True).prompts] == ["0:1"]
    assert len(loaded(tmp_path, {"prompt": messages, "allow_dropped_content": True})) == 1


def test_arguments_of_a_call_that_the_template_drops_are_named(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% for c in m.tool_calls or [] %}add{% endfor %}"
    )
    chat = [ASKED, {"role": "assistant", "tool_calls": [CALL]}, ASKED]
    with pytest.raises(DataError, match="the arguments of the call of add"):
        loaded(tmp_path, {"prompt": chat}, template=template)


def test_thoughts_of_earlier_turns_may_be_dropped(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "2.", "reasoning_content": "One and one."}
    assert "One and one" not in text_of(loaded(tmp_path, {"prompt": [ASKED, answer, ASKED]}))


@pytest.mark.parametrize("form", ["objects", "text", "table"])
def test_tools_of_a_row_are_shown_by_the_template(tmp_path: Path, form: str) -> None:
    row: dict[str, Any] = {"prompt": [ASKED], "tools": json.dumps([ADD]) if form == "text" else [ADD]}
    tokenizer = tokenizer_of("qwen3")
    if form == "table":
        other = {"type": "function", "function": {"name": "mul", "strict": True}}
        file = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([row, {"prompt": [ASKED], "tools": [other]}]), file)
        dataset = load_prompts([str(file)], tokenizer, env_class="x", max_prompt_length=10**6)
        assert "null" not in tokenizer.decode(dataset.prompts[0].token_ids)
    else:
        dataset = loaded(tmp_path, row, tokenizer=tokenizer)
    expected = tokenizer.apply_chat_template([ASKED], tools=[ADD], add_generation_prompt=True, return_dict=False)
    prompt = dataset.prompts[0]
    assert list(prompt.token_ids) == expected
    assert prompt.tools == (ADD,) and prompt.extras["tools"] is not None


def test_tools_that_the_template_ignores_make_a_bad_row(tmp_path: Path) -> None:
    for question in (ASKED, {"role": "user", "content": "Please add 1 and 1."}):  # the name of the tool is in the text
        with pytest.raises(DataError, match="row 0: the chat template leaves out the tool add"):
            loaded(tmp_path, {"prompt": [question], "tools": [ADD]}, template=CHATML)


@pytest.mark.parametrize("tools", [["calculator"], "calculator", {"calculator": {"limit": 3}}, [], [{"limit": 3}]])
def test_a_column_of_tools_that_holds_no_schemas_is_the_environments_alone(tmp_path: Path, tools: Any) -> None:
    prompt = loaded(tmp_path, {"prompt": [ASKED], "tools": tools}).prompts[0]
    assert (prompt.tools, prompt.extras["tools"]) == ((), tools)


@pytest.mark.parametrize("name", ["images", "videos", "audio"])
def test_media_that_the_policy_never_sees_make_a_bad_row(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"row 0: it has {name}, and this version trains on text alone"):
        loaded(tmp_path, {"prompt": [ASKED], name: [{"path": "x"}]})
    assert len(loaded(tmp_path, {"prompt": [ASKED], name: "a name for the environment"})) == 1


@pytest.mark.parametrize("beginning", ["The answer is", "a", "", "It is \\boxed{"])
def test_a_begun_answer_is_continued(tmp_path: Path, beginning: str) -> None:
    dataset = loaded(tmp_path, {"prompt": [ASKED, {"role": "assistant", "content": beginning}]}, template=CHATML)
    expected = f"<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n{beginning}"
    assert text_of(dataset, CHATML) == expected
    assert dataset.prompts[0].full_answer(" 2") == f"{beginning} 2"


def test_thoughts_that_a_template_drops_from_a_begun_answer_make_a_bad_row(tmp_path: Path) -> None:
    partial_answer = {"role": "assistant", "content": "So", "reasoning_content": "One and one."}
    with pytest.raises(DataError, match="leaves out the thoughts"):
        loaded(tmp_path, {"prompt": [ASKED, partial_answer]})


def test_an_answer_cannot_begin_with_a_call_of_a_tool(tmp_path: Path) -> None:
    chat = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(DataError, match="row 0: the last message is a tool call of the assistant without its result"):
        loaded(tmp_path, {"prompt": chat})


def test_a_template_that_cannot_continue_an_answer_makes_a_bad_row(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if not loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="row 0: the chat template refuses a conversation of user, assistant"):
        loaded(tmp_path, {"prompt": [ASKED, {"role": "assistant", "content": "So"}]}, template=template)


def test_prompts_that_an_agent_renders_itself_are_not_checked(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "human", "content": "go"}], "tools": [ADD], "images": ["x.png"]}
    (prompt,) = loaded(tmp_path, row, rendered=False).prompts
    assert (prompt.messages, prompt.tools) == (({"role": "human", "content": "go"},), ())


def random_row(rng: random.Random) -> dict[str, Any]:
    """A row with any roles and parts, its words short or long, so that they may occur elsewhere by chance."""
    roles = ("user", "user", "user", "assistant", "system", "tool", "developer", "human", "ipython")
    words = ("a", "user", "Say 7.", "the first of three", 'so "quoted"', "Ünïcode", "<think>hm</think>\n\nyes", " ")
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 4)):
        message: dict[str, Any] = {"role": rng.choice(roles), "content": rng.choice(words)}
        if message["role"] == "assistant" and rng.random() < 0.3:
            message["tool_calls"] = [CALL]
        if rng.random() < 0.1:
            message["name"] = "Ann"
        messages.append(message)
    return {"prompt": messages, **({"tools": [ADD]} if rng.random() < 0.3 else {})}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_refused_is_in_the_text(tmp_path: Path, name: str) -> None:
    rng, tokenizer = random.Random(name), tokenizer_of(name)
    rows = [*(random_row(rng) for _ in range(40)), {"prompt": [ASKED]}]
    dataset = loaded(tmp_path, *rows, tokenizer=tokenizer, skip_bad_rows=True)
    assert len(dataset) + len(dataset.bad_rows) == len(rows)
    for prompt in dataset.prompts:
        text = tokenizer.decode(prompt.token_ids)
        assert not [part for message in prompt.messages for part in dropped(message, text, thoughts=False)]
        assert not dropped_tools(prompt.tools, text)
        assert bool(prompt.answer_prefix) == (prompt.messages[-1]["role"] == "assistant")
        if prompt.answer_prefix:  # nothing follows what has begun
            assert text.rstrip().casefold().endswith(prompt.answer_prefix[0]["content"].strip()[-3:].casefold())


REFUSES = PASSES_OVER.replace(
    "{%- if m.role in", "{%- if m.role == 'odd' %}{{ raise_exception('odd') }}{%- endif %}{%- if m.role in"
)
"""The same, which refuses a conversation with the role `odd`."""


@pytest.mark.parametrize("template", [CHATML, PASSES_OVER, REFUSES])
def test_rows_that_are_rendered_together_are_as_each_alone(tmp_path: Path, template: str) -> None:
    chats = [
        [ASKED],
        [{"role": "system", "content": "Be short."}, ASKED],
        [ASKED, {"role": "assistant", "content": "It is"}],
        [{"role": "odd", "content": "hello"}],
        [{**ASKED, "content": "2+2?"}],
    ]
    together = loaded(tmp_path, *({"prompt": chat} for chat in chats), template=template, skip_bad_rows=True)
    separate_prompts = list[Prompt]()
    for chat in chats:
        try:
            separate_prompts += loaded(tmp_path, {"prompt": chat}, template=template).prompts
        except DataError:
            assert "odd" in chat[0]["role"]
    assert [prompt.token_ids for prompt in together.prompts] == [prompt.token_ids for prompt in separate_prompts]
    assert len(separate_prompts) == (5 if template == CHATML else 4)


def test_plain_rows_are_rendered_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer(CHATML)
    apply = tokenizer.apply_chat_template
    calls: list[int] = []

    def counted(chats: Sequence[Any], **options: Any) -> Any:
        calls.append(len(chats))
        return apply(chats, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    rows = [{"prompt": [{"role": "user", "content": f"{number} + 1?"}]} for number in range(20)]
    assert len(loaded(tmp_path, *rows, tokenizer=tokenizer).prompts) == 20
    assert calls == [20, 1]  # all rows, and a conversation that shows which messages the template passes over
