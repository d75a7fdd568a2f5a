"""A chat template that computes without an end is stopped, wherever a template is run, and named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl.chats import deadline
from skyrl.chats.deadline import bounded
from skyrl.chats.text import chat_text
from skyrl.config import ChatTemplateConfig
from skyrl.data.prompts import load_prompts
from skyrl.errors import ConfigError, TemplateTimeoutError
from skyrl.models.files.chat_templates import with_template
from skyrl.models.files.template_text import TemplateRefusal, render_template

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
RECURSION = "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}"
ASKED = [{"role": "user", "content": "a"}]

without_end = pytest.mark.parametrize("template", [LOOPS, RECURSION], ids=["loops", "recursion"])


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "CPU_SECONDS", 0.2)


@pytest.fixture
def tokenizer(nano: Path) -> Any:
    return AutoTokenizer.from_pretrained(nano / "model")


@without_end
def test_a_conversation_is_refused(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(TemplateTimeoutError, match=r"^the chat template of .*model used 0\.2 s of processor time"):
        chat_text(tokenizer, ASKED, generation_prompt=True)


@without_end
def test_data_are_not_read_row_by_row_with_it(tokenizer: Any, nano: Path, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(TemplateTimeoutError, match="the chat template of .* used"):
        load_prompts([str(nano / "train.jsonl")], tokenizer, env_class="gsm8k", max_prompt_length=16)


@without_end
def test_a_configuration_that_names_it_is_refused(tokenizer: Any, template: str, tmp_path: Path) -> None:
    (tmp_path / "endless.jinja").write_text(template, encoding="utf-8")
    config = ChatTemplateConfig(source="file", name_or_path=str(tmp_path / "endless.jinja"))
    with pytest.raises(ConfigError, match=r"generator.chat_template.name_or_path.*endless.jinja used"):
        with_template(tokenizer, config)


@without_end
def test_a_check_before_the_run_refuses_it(template: str) -> None:
    with pytest.raises(TemplateRefusal, match="without finishing"):
        render_template(template, ASKED)


def test_what_comes_after_a_template_that_ends_is_not_stopped() -> None:
    with bounded("a short one"):
        pass
    assert sum(1 for _ in range(5_000_000)) == 5_000_000  # half a second of processor time


TRACED = """
import sys
from skyrl.chats import deadline
from skyrl.errors import TemplateTimeoutError

deadline.CPU_SECONDS = 0.02
for _ in range(3):
    try:
        with deadline.bounded("a template"):
            while True:
                pass
    except TemplateTimeoutError:
        pass

def traced():
    return "traced"

sys.settrace(lambda *_: None)
print(traced())
"""


def test_a_process_can_be_traced_after_a_template_was_stopped() -> None:
    """As debuggers and coverage do. A process that cannot be traced never ends."""
    result = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=600)
    assert result.stdout == "traced\n", result.stderr
