"""From rows to prompts: chat template, length filter, and the task that will judge the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from skyrl.data.sources import Row, chat_of, read_rows
from skyrl.errors import DataError
from skyrl.trajectory import Prompt

_OWN_COLUMNS = ("prompt", "env_class", "data_source")


@frozen(kw_only=True)
class PromptDataset:
    """Prompts in the order of their sources, and how many rows were too long to be one."""

    prompts: tuple[Prompt, ...]
    too_long: int = 0

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(
    sources: Sequence[str],
    tokenizer: Any,
    *,
    env_class: str | None,
    max_prompt_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PromptDataset:
    """Read every source and tokenize each row's chat with the model's template.

    Rows longer than `max_prompt_length` tokens are left out and counted. A row may name its own `env_class`; without
    one it gets `env_class`, if that is not None. Raises `DataError` for a bad source or row, and when no row is short
    enough.
    """
    prompts: list[Prompt] = []
    too_long = 0
    for index, source in enumerate(sources):
        rows = read_rows(source)
        chats = [chat_of(row, number, source) for number, row in enumerate(rows)]
        for number, (row, chat, token_ids) in enumerate(
            zip(rows, chats, _tokenize(chats, tokenizer, chat_template_kwargs or {}, source), strict=True)
        ):
            if len(token_ids) > max_prompt_length:
                too_long += 1
            else:
                prompts.append(_prompt(row, chat, token_ids, f"{index}:{number}", env_class))
    if not prompts:
        raise DataError(
            f"all {too_long} rows of {', '.join(sources)} are longer than "
            f"trainer.max_prompt_length = {max_prompt_length} tokens"
        )
    return PromptDataset(prompts=tuple(prompts), too_long=too_long)


def _tokenize(
    chats: Sequence[Sequence[Mapping[str, str]]], tokenizer: Any, kwargs: Mapping[str, Any], source: str
) -> list[list[int]]:
    try:
        encoded: list[list[int]] = tokenizer.apply_chat_template(
            [list(chat) for chat in chats], add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise DataError(f"{source}: the tokenizer's chat template refuses a prompt: {error}") from error
    return encoded


def _prompt(row: Row, chat: Any, token_ids: Sequence[int], row_id: str, env_class: str | None) -> Prompt:
    task = row.get("env_class") or env_class
    if not isinstance(task, str):
        raise DataError(
            f"row {row_id} (source:row) names no env_class, and environment.env_class gives none for such rows"
        )
    return Prompt(
        id=row_id,
        messages=chat,
        token_ids=tuple(token_ids),
        env_class=task,
        data_source=str(row.get("data_source") or "default"),
        extras={key: value for key, value in row.items() if key not in _OWN_COLUMNS and value is not None},
    )
