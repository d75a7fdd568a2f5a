"""A stored sample as a conversation: messages of the prompt, then sampled text and the text inserted between."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from attrs import evolve, frozen

from skyrl.tracking.token_file import TokenTable
from skyrl.viewer.token_shades import Token, shades

_HEADER = re.compile(
    r"<\|im_start\|>(\w+)|<\|start_header_id\|>(\w+)|<start_of_turn>(\w+)|<\|(tool|user|observation)\|>"
)
"""The beginning of a message in chat templates, with its role."""


@frozen(kw_only=True)
class Message:
    """A message of the prompt, or a part of the answer: text, or tokens if these are stored."""

    role: str
    text: str = ""
    details: str = ""
    """Tool calls and other keys of a message, as JSON."""

    tokens: tuple[tuple[Token, str], ...] = ()
    """Tokens of a part of the answer, each with its shade."""


def prompt_messages(record: Mapping[str, Any]) -> list[Message]:
    """The messages of the prompt."""
    return [_message(message) for message in record.get("prompt", ()) if isinstance(message, Mapping)]


def answer_tokens(record: Mapping[str, Any], table: TokenTable | None) -> list[list[Token]]:
    """Tokens of each row of the sample, from the first turn; empty if they are not stored, or belong to another attempt
    at the step.
    """
    if table is None:
        return []
    columns = table.columns
    numbers = [
        number
        for number, (prompt, sample) in enumerate(zip(columns["prompt_id"], columns["sample"], strict=True))
        if (prompt, sample) == (record.get("prompt_id"), record.get("sample"))
    ]
    rows = [*record.get("earlier", ()), record]
    if [columns["response_ids"][number] for number in numbers] != [row.get("response_ids") for row in rows]:
        return []
    return [_tokens(table, number) for number in numbers]


def answer_parts(record: Mapping[str, Any], rows: Sequence[Sequence[Token]], mode: str) -> list[Message]:
    """The answer, split into sampled parts and parts inserted between them; as text if no tokens are stored."""
    if not rows:
        texts = [str(row.get("response", "")) for row in (*record.get("earlier", ()), record)]
        return [Message(role="assistant", text=text) for text in texts]
    return [part for row in rows for part in _parts(row, mode)]


def window(rows: Sequence[Sequence[Token]], first: int, most: int) -> list[list[Token]]:
    """At most `most` tokens from index `first`, counted over all rows, grouped by row."""
    cut, before = [], 0
    for row in rows:
        start, stop = max(first - before, 0), max(first + most - before, 0)
        if part := list(row[start:stop]):
            cut.append(part)
        before += len(row)
    return cut


def _tokens(table: TokenTable, number: int) -> list[Token]:
    ids = table.columns["response_ids"][number]

    def column(name: str) -> Sequence[Any]:
        given: Sequence[Any] = table.columns[name][number] if name in table.columns else ()
        return given or [None] * len(ids)  # a run without log-probabilities stores empty lists

    named = zip(
        ids,
        *map(column, ("loss_mask", "weight_versions", "rollout_logprobs", "old_logprobs", "advantages")),
        strict=True,
    )
    return [
        Token(text=table.pieces.get(id, "�"), id=id, sampled=sampled, version=version, logprob=logprob)
        if not sampled
        else Token(
            text=table.pieces.get(id, "�"),
            id=id,
            sampled=True,
            version=version,
            logprob=logprob,
            learner=learner,
            advantage=advantage,
        )
        for id, sampled, version, logprob, learner, advantage in named
    ]


def _parts(row: Sequence[Token], mode: str) -> list[Message]:
    shaded = list(zip(row, shades(row, mode), strict=True))
    parts = []
    for sampled, run in groupby(shaded, key=lambda pair: pair[0].sampled):
        tokens = tuple(run)
        role = "assistant" if sampled else _role("".join(token.text for token, _ in tokens))
        parts.append(Message(role=role, tokens=tokens))
    return parts


def _role(text: str) -> str:
    """Role of an inserted text: the first one that a template's header names, else `environment`."""
    match = _HEADER.search(text)
    name = next((name for name in match.groups() if name), "") if match else ""
    return name if name and name != "assistant" else "environment"


def _message(message: Mapping[str, Any]) -> Message:
    role, content = str(message.get("role", "?")), message.get("content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    shown = Message(role=role, text=content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return evolve(shown, details=json.dumps(rest, ensure_ascii=False, indent=1)) if rest else shown
