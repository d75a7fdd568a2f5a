"""Chat templates that replace the tokenizer's: a built-in one, by name, or the user's Jinja file.

A template is a program. It runs in transformers' sandbox, which refuses access beyond the messages.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from skyrl.chats.deadline import bounded
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import ChatTemplateConfig
from skyrl.errors import ConfigError, Problem, TemplateTimeoutError

LARGEST_FILE = 1 << 20
"""Largest accepted size in bytes. The largest published templates have some tens of thousands."""

_ASK = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{% endif %}"
)

_CALLS = (
    "{% for call in message['tool_calls'] or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)

_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
)

_CHATML = (
    f"{_TOOLS}{{% for message in messages %}}{{% set content = message['content'] or '' %}}HISTORY"
    "{% if message['role'] == 'tool' %}"
    + _RESULT
    + "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ content }}" + _CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
)

_WITHOUT_EARLIER_THOUGHTS = (
    "{% if message['role'] == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)

BUILT_IN: Mapping[str, str] = {
    "qwen3_with_thinking": _CHATML.replace("HISTORY", "") + _ASK,
    "qwen3_without_thinking": _CHATML.replace("HISTORY", _WITHOUT_EARLIER_THOUGHTS) + _ASK,
}
"""Name -> template in Qwen3's format, which keeps the thoughts of every answer, or, as Qwen3 does, only of the last."""


def with_template(
    tokenizer: ChatTokenizer, config: ChatTemplateConfig, path: str = "generator.chat_template"
) -> ChatTokenizer:
    """A tokenizer that renders chats with the configured template; the same tokenizer if none is configured.

    `path` is the dotted path of the configuration, for messages.

    Raises `ConfigError` for a name that is not built in, and for a file that cannot be read, is too large, or is not a
    template that the sandbox accepts: faults that any conversation reveals, an endless loop among them.
    """
    text, name = configured_template(config, path), config.name_or_path
    if text is None:
        return tokenizer
    changed = copy.copy(tokenizer)
    changed.chat_template = text
    messages = [{"role": "user", "content": "?"}]
    try:
        with bounded(f"the chat template {name}"):
            changed.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateTimeoutError as error:
        raise _unusable(path, str(error)) from error
    except TemplateSyntaxError as error:
        message = f"{name}, line {error.lineno} is not a Jinja template: {error.message}"
        raise _unusable(path, message) from error
    except SecurityError as error:
        message = f"{name} does something that the chat template sandbox forbids: {error}"
        raise _unusable(path, message) from error
    except Exception:  # noqa: BLE001 - a template may raise anything for messages that it does not expect
        pass  # the messages of the data come later, and refusing those is an error
    return changed


def unread_variables(tokenizer: ChatTokenizer, arguments: Mapping[str, Any]) -> list[str]:
    """Names of variables that the tokenizer's chat template never mentions, so that they have no effect."""
    template = str(tokenizer.chat_template)
    return [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", template)]


def configured_template(config: ChatTemplateConfig, path: str = "generator.chat_template") -> str | None:
    """The text of the configured template, or None if the tokenizer's is used. Raises `ConfigError`."""
    name = config.name_or_path
    if name is None:
        return None
    if config.source != "file":
        if name not in BUILT_IN:
            raise _unusable(path, f"there is no built-in template {name!r}; available: {', '.join(BUILT_IN)}")
        return BUILT_IN[name]
    stored = Path(name).expanduser()
    try:
        with stored.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _unusable(path, f"the chat template {stored} cannot be read: {error.strerror}") from error
    if len(content) > LARGEST_FILE:
        raise _unusable(path, f"{stored} has more than {LARGEST_FILE} bytes, which no chat template needs")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _unusable(path, f"{stored} is not UTF-8 text") from error


def _unusable(path: str, message: str) -> ConfigError:
    """The error at the field that names the template."""
    return ConfigError([Problem(path=f"{path}.name_or_path", message=message)])


def with_defaults(template: str, arguments: Mapping[str, Any]) -> str:
    """The template with default values for the variables that the caller does not set."""
    literals = json.loads(json.dumps(dict(arguments), default=dict))  # whose `repr` is a literal of Jinja, too
    lines = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
        for name, value in literals.items()
    )
    return "".join(lines) + template
