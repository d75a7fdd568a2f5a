from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.config import ChatTemplateConfig
from skyrl.config.generator import CHAT_TEMPLATES
from skyrl.errors import ConfigError
from skyrl.models.chat_templates import BUILT_IN, LARGEST_FILE, with_template
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
    ("text", "said"),
    [
        ("{% for m in", "template.jinja, line 1 is not a Jinja template"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "does what the sandbox of chat templates forbids"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"x" * (LARGEST_FILE + 1), f"more than {LARGEST_FILE} bytes"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError, match="generator.chat_template.name_or_path") as refused:
        with_template(chat_tokenizer(), file(tmp_path, text))
    assert said in str(refused.value)


def test_the_configuration_knows_the_names_that_are_built_in() -> None:
    assert tuple(BUILT_IN) == CHAT_TEMPLATES


def test_a_missing_file_and_an_unknown_name_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone.jinja cannot be read: No such file"):
        with_template(chat_tokenizer(), ChatTemplateConfig(source="file", name_or_path=str(tmp_path / "gone.jinja")))
    with pytest.raises(ConfigError, match="no template 'qwen4' is built in; there are qwen3_with_thinking"):
        with_template(chat_tokenizer(), ChatTemplateConfig(name_or_path="qwen4"))


def test_a_template_may_refuse_a_conversation_that_the_run_does_not_have(tmp_path: Path) -> None:
    text = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    assert with_template(chat_tokenizer(), file(tmp_path, text)).chat_template == text
