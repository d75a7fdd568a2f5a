"""Renders a chat template exactly as transformers does, but without it, for checks before a run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, UndefinedError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl.chats.deadline import bounded
from skyrl.errors import TemplateTimeoutError


class TemplateRefusal(Exception):
    """Raised for a template that is not valid, leaves the sandbox, does not terminate, or refuses the conversation by
    `raise_exception`.
    """


def render_template(template: str, messages: Sequence[Mapping[str, Any]], **variables: object) -> str | None:
    """The conversation as the template renders it, with the header of an answer; `variables` are special tokens,
    `chat_template_kwargs` and `tools`.

    None if the template needs a variable that only the tokenizer knows. Raises `TemplateRefusal`.
    """
    try:
        compiled = _environment().from_string(template)
        with bounded("the chat template"):
            return compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **{"tools": None, **variables},
            )
    except UndefinedError:
        return None
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise TemplateRefusal((f"line {line}: " if line else "") + str(error.message)) from error
    except TemplateTimeoutError as error:
        raise TemplateRefusal(str(error)) from error
    except Exception as error:
        raise TemplateRefusal(f"{type(error).__name__}: {error}") from error


class _Generation(Extension):
    """The tag `{% generation %}`, which marks learned text; rendering it writes its content."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
