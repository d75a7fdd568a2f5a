from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.config import ChatTemplateConfig
from skyrl.config.settings.generator import CHAT_TEMPLATES
from skyrl.errors import ConfigError
from skyrl.models.files.chat_templates import BUILT_IN, LARGEST_FILE, with_template
from skyrl.runs.inputs import report_unread_variables
from tests.rollout.chats import chat_tokenizer


def file(folder: Path, text: str | bytes) -> ChatTemplateConfig:
    path = folder / "template.jinja"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ChatTemplateConfig(source="file", name_or_path=str(path))


def test_without_a_template_the_tokenizer_stays_as_it_is() -> None:
    tokenizer = chat_tokenizer()
    assert with_template(tokenizer, ChatTemplateConfig()) is tokenizer


def test_the_tokenizer_that_is_given_is_not_changed(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    before = tokenizer.chat_template
    assert with_template(tokenizer, file(tmp_path, "x")).chat_template == "x"
    assert tokenizer.chat_template == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in", "template.jinja, line 1 is not a Jinja template"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "that the chat template sandbox forbids"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"x" * (LARGEST_FILE + 1), f"more than {LARGEST_FILE} bytes"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match="generator.chat_template.name_or_path") as refused:
        with_template(chat_tokenizer(), file(tmp_path, text))
    assert message in str(refused.value)


def test_the_configuration_knows_the_names_that_are_built_in() -> None:
    assert tuple(BUILT_IN) == CHAT_TEMPLATES


def test_a_missing_file_and_an_unknown_name_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone.jinja cannot be read: No such file"):
        with_template(chat_tokenizer(), ChatTemplateConfig(source="file", name_or_path=str(tmp_path / "gone.jinja")))
    with pytest.raises(ConfigError, match="there is no built-in template 'qwen4'; available: qwen3_with_thinking"):
        with_template(chat_tokenizer(), ChatTemplateConfig(name_or_path="qwen4"))


def test_a_template_may_refuse_a_conversation_that_the_run_does_not_have(tmp_path: Path) -> None:
    text = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    assert with_template(chat_tokenizer(), file(tmp_path, text)).chat_template == text


def test_the_built_in_templates_write_tools_as_qwen3_does() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "5"},
    ]
    for text in BUILT_IN.values():
        rendered_chat = chat_tokenizer(text).apply_chat_template(
            chat, tools=[tool], tokenize=False, add_generation_prompt=True
        )
        assert rendered_chat.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call")
        assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>\n\nFor each' in rendered_chat
        assert rendered_chat.endswith(
            "</tool_call><|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_a_variable_that_the_template_does_not_read_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = with_template(chat_tokenizer(), file(tmp_path, "{% if enable_thinking %}<think>{% endif %}"))
    report_unread_variables("chat_template_kwargs", tokenizer, {"enable_thinking": True, "enable_think": True})
    warning = "chat_template_kwargs.enable_think has no effect: the chat template reads no variable of this name\n"
    assert capsys.readouterr().err == warning
