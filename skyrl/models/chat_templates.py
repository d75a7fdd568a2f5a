"""Chat templates in place of the tokenizer's: built in by name, or a Jinja file of the user's.

A template is a program. It runs in transformers' sandbox, which refuses what reaches beyond the messages.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from skyrl.config import ChatTemplateConfig
from skyrl.errors import ConfigError, Problem

LARGEST_FILE = 1 << 20
"""Bytes. The largest published templates have some tens of thousands."""

_ASK = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

_CHATML = (
    "{%% for message in messages %%}{%% set content = message['content'] %%}%s"
    "<|im_start|>{{ message['role'] }}\n{{ content }}<|im_end|>\n{%% endfor %%}"
)

_WITHOUT_EARLIER_THOUGHTS = (
    "{% if message['role'] == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)

BUILT_IN: Mapping[str, str] = {
    "qwen3_with_thinking": _CHATML % "" + _ASK,
    "qwen3_without_thinking": _CHATML % _WITHOUT_EARLIER_THOUGHTS + _ASK,
}
"""Qwen3's format: with the thoughts of every answer, or with those of the last alone, as Qwen3 is used."""

_PATH = "generator.chat_template.name_or_path"


def with_template(tokenizer: Any, config: ChatTemplateConfig) -> Any:
    """A tokenizer that writes chats with the configured template; the same one where none is configured.

    Raises `ConfigError` for a name that is not built in, and for a file that cannot be read, is too large, or is no
    template that the sandbox takes.
    """
    text = _text(config)
    if text is None:
        return tokenizer
    changed = copy.copy(tokenizer)
    changed.chat_template = text
    _refuse_broken(changed, str(config.name_or_path))
    return changed


def _text(config: ChatTemplateConfig) -> str | None:
    name = config.name_or_path
    if name is None:
        return None
    if config.source == "file":
        return _read(Path(name).expanduser())
    if name not in BUILT_IN:
        raise _refusal(f"no template {name!r} is built in; there are {', '.join(BUILT_IN)}")
    return BUILT_IN[name]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _refusal(f"the chat template {path} cannot be read: {error.strerror}") from error
    if len(content) > LARGEST_FILE:
        raise _refusal(f"{path} has more than {LARGEST_FILE} bytes, which no chat template needs")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _refusal(f"{path} is not UTF-8 text") from error


def _refuse_broken(tokenizer: Any, name: str) -> None:
    """What can be seen without a conversation of the run's own: it is Jinja, and stays in the sandbox."""
    asked = [{"role": "user", "content": "?"}]
    try:
        tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        raise _refusal(f"{name}, line {error.lineno} is not a Jinja template: {error.message}") from error
    except SecurityError as error:
        raise _refusal(f"{name} does what the sandbox of chat templates forbids: {error}") from error
    except Exception:  # noqa: BLE001 - it may want other messages, and is asked again with those of the data
        pass


def _refusal(message: str) -> ConfigError:
    return ConfigError([Problem(path=_PATH, message=message)])
