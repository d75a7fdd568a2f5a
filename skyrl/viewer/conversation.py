"""A stored sample as a conversation: messages of the prompt, then the turns of the policy and what came between them.

Markup of the chat template is told apart from content: from the tokens where they are stored, else from the text alone.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

from attrs import evolve, frozen

from skyrl.tracking.token_file import TokenTable
from skyrl.viewer.token_shades import Token, shades

_POLICY = ("", "assistant")
"""Roles of stretches of an answer that the policy wrote; it begins without a header."""

# Markup of chat templates is recognised by its form, as the files of a run do not have the template. Known are the
# forms of ChatML (Qwen and others), Llama 3, Gemma, GLM, Phi, DeepSeek and Harmony.
_HEADER = (
    r"<\|im_start\|>(\w+)\n?",
    r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n{0,2}",
    r"<start_of_turn>(\w+)\n?",
    r"<\|(system|user|assistant|tool|observation|environment)\|>\n?",
    r"<\uff5c(User|Assistant)\uff5c>",
    r"<\|start\|>(\w+)(?:<\|channel\|>\w+)?<\|message\|>",
)
_TOKEN = r"<\|[\w▁-]{1,40}\|>|<\uff5c[\w▁-]{1,40}\uff5c>|<(?:start_of_turn|end_of_turn|bos|eos|pad|unk|/?s)>|\[/?INST\]"
_MARKUP = re.compile(rf"(?:{'|'.join(_HEADER)})|(?:{_TOKEN})")
_SPECIAL = re.compile(_TOKEN)


@frozen(kw_only=True)
class Stretch:
    """Consecutive characters of a text."""

    text: str
    role: str = ""
    """Role of the message that the text belongs to; empty before the first header."""

    is_markup: bool = False


def is_special(text: str) -> bool:
    """Whether the text of one token has the form of a special token."""
    return bool(_SPECIAL.fullmatch(text))


def stretches(text: str) -> Iterator[Stretch]:
    """The text in stretches of content and of markup. White space between two stretches of markup is markup."""
    role, end = "", 0
    for match in _MARKUP.finditer(text):
        if between := text[end : match.start()]:
            yield Stretch(text=between, role=role, is_markup=not between.strip())
        role = next((name.lower() for name in match.groups() if name), role)
        yield Stretch(text=match[0], role=role, is_markup=True)
        end = match.end()
    if rest := text[end:]:
        yield Stretch(text=rest, role=role, is_markup=bool(end) and not rest.strip())


@frozen(kw_only=True)
class Fragment:
    """A part of a message: a stretch of text, or one token."""

    text: str
    is_markup: bool = False
    shade: str = ""
    """Class of a token in the style sheet; empty for text."""

    title: str = ""
    """Numbers of a token."""


@frozen(kw_only=True)
class Message:
    """A message of the prompt, a turn of the policy, or what the environment or the template put between turns."""

    role: str
    fragments: tuple[Fragment, ...] = ()
    details: str = ""
    """Tool calls and other keys of a message, as JSON."""

    turn: int | None = None
    """Number of the policy's turn, counted from 1; None for what the policy did not write."""

    reward: float | str | None = None
    """Reward of the turn, where each turn has its own."""

    @property
    def text(self) -> str:
        """The content, without markup."""
        return "".join(fragment.text for fragment in self.fragments if not fragment.is_markup)


def prompt_messages(record: Mapping[str, Any]) -> list[Message]:
    """The messages of the prompt."""
    return [_message(message) for message in record.get("prompt", ()) if isinstance(message, Mapping)]


def last_prompt(record: Mapping[str, Any]) -> str:
    """The text of the last message of the prompt that is not the assistant's: the question, as a rule."""
    messages = [message for message in prompt_messages(record) if message.role != "assistant"]
    return messages[-1].text if messages else ""


def expected_answer(record: Mapping[str, Any]) -> str:
    """The row's ground truth as text; empty if it has none, or if the run was made by a version that kept none."""
    truth = record.get("ground_truth")
    return "" if truth is None else truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)


def other_columns(record: Mapping[str, Any]) -> dict[str, str]:
    """The row's other columns as text: `ground_truth` is shown on its own."""
    columns = record.get("columns")
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in (columns.items() if isinstance(columns, Mapping) else ())
        if name != "ground_truth"
    }


def answer_tokens(record: Mapping[str, Any], table: TokenTable | None) -> list[list[Token]]:
    """Tokens of each row of the sample, from the first turn: what its prompt adds to the row before, then its answer.
    Empty if they are not stored, or belong to another attempt at the step.
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
    return [[*_shown_before(table, numbers, index), *_tokens(table, number)] for index, number in enumerate(numbers)]


def answer_parts(record: Mapping[str, Any], rows: Sequence[Sequence[Token]], mode: str) -> list[Message]:
    """The answer as turns of the policy and the messages between them; from its text if no tokens are stored."""
    if rows:
        return _numbered((part for row in rows for part in _token_parts(row, mode)), record)
    return answer_messages(record)


def answer_messages(record: Mapping[str, Any]) -> list[Message]:
    """The answer as turns of the policy and the messages between them, told from its text alone."""
    texts = [str(row.get("response", "")) for row in (*record.get("earlier", ()), record)]
    return _numbered((part for text in texts for part in text_parts(text)), record)


def text_parts(text: str) -> list[Message]:
    """The messages of an answer's text, split at the headers of a chat template."""
    parts = []
    for role, own in groupby(stretches(text), key=lambda stretch: stretch.role):
        fragments = tuple(Fragment(text=item.text, is_markup=item.is_markup) for item in own)
        if role in _POLICY or not all(fragment.is_markup for fragment in fragments):
            parts.append(Message(role="assistant" if role in _POLICY else role, fragments=fragments))
    return parts or [Message(role="assistant")]


def excerpt(text: str, most: int) -> str:
    """The beginning of an answer on one line: its content, and the roles of others who speak in it."""
    turns = []
    for part in text_parts(text[: 4 * most]):
        words = " ".join(part.text.split())
        turns.append(words if part.role == "assistant" else f"{part.role}: {words}")
    return " ▸ ".join(turns)[:most]


def window(rows: Sequence[Sequence[Token]], first: int, most: int) -> list[list[Token]]:
    """At most `most` tokens from index `first`, counted over all rows, grouped by row."""
    cut, before = [], 0
    for row in rows:
        start, stop = max(first - before, 0), max(first + most - before, 0)
        if part := list(row[start:stop]):
            cut.append(part)
        before += len(row)
    return cut


def _numbered(parts: Iterable[Message], record: Mapping[str, Any]) -> list[Message]:
    """The parts with the numbers of the policy's turns, and the rewards of turns if each has one."""
    messages = list(parts)
    turns = [part for part in messages if part.role == "assistant"]
    rewards = record.get("turn_rewards", ())
    fitting = rewards if isinstance(rewards, Sequence) and len(rewards) == len(turns) else [None] * len(turns)
    of_turns = iter(zip(range(1, len(turns) + 1), fitting, strict=True))
    return [
        evolve(part, turn=turn, reward=reward)
        for part in messages
        for turn, reward in [next(of_turns) if part.role == "assistant" else (None, None)]
    ]


def _shown_before(table: TokenTable, numbers: Sequence[int], index: int) -> list[Token]:
    """Tokens that the prompt of a row adds to the row before it, where each turn is a row of its own."""
    prompts = table.columns["prompt_ids"]
    if index == 0:
        return []
    before, ids = numbers[index - 1], prompts[numbers[index]]
    known = [*prompts[before], *table.columns["response_ids"][before]]
    same = next((n for n, (one, other) in enumerate(zip(known, ids, strict=False)) if one != other), len(known))
    tokens = [Token(text=table.pieces.get(id, "�"), id=id, sampled=False) for id in ids[same:]]
    return tokens if same == len(known) else _tokens_after_policy(tokens)


def _tokens_after_policy(tokens: Sequence[Token]) -> list[Token]:
    """The tokens after the policy's last message: earlier turns, which a template rewrote, are shown already."""
    end = last = 0
    for stretch in stretches("".join(token.text for token in tokens)):
        end += len(stretch.text)
        if stretch.role in _POLICY and not stretch.is_markup:
            last = end
    offsets = accumulate((len(token.text) for token in tokens), initial=0)
    return [token for token, offset in zip(tokens, offsets, strict=False) if offset >= last]


def _tokens(table: TokenTable, number: int) -> list[Token]:
    ids = table.columns["response_ids"][number]

    def column(name: str) -> Sequence[Any]:
        values: Sequence[Any] = table.columns[name][number] if name in table.columns else ()
        return values or [None] * len(ids)  # a run without log-probabilities stores empty lists

    named = zip(
        ids,
        *map(column, ("loss_mask", "weight_versions", "rollout_logprobs", "old_logprobs", "advantages")),
        strict=True,
    )
    return [
        Token(
            text=table.pieces.get(id, "�"),
            id=id,
            sampled=sampled,
            version=version,
            logprob=logprob,
            learner=learner if sampled else None,
            advantage=advantage if sampled else None,
        )
        for id, sampled, version, logprob, learner, advantage in named
    ]


def _token_parts(row: Sequence[Token], mode: str) -> Iterator[Message]:
    """Turns of the policy, and between them the messages of inserted tokens. Inserted tokens without content, and those
    that begin the policy's answer for it, belong to the turn that follows.
    """
    shaded = list(zip(row, shades(row, mode), strict=True))
    waiting: tuple[Fragment, ...] = ()
    for sampled, run in groupby(shaded, key=lambda pair: pair[0].sampled):
        own = tuple(run)
        if sampled:
            turn = tuple(_fragment(token, shade, is_special(token.text)) for token, shade in own)
            yield Message(role="assistant", fragments=waiting + turn)
            waiting = ()
            continue
        for role, fragments in _inserted(own):
            if role == "assistant" or all(fragment.is_markup for fragment in fragments):
                waiting = waiting + fragments
            else:
                yield Message(role=role or "environment", fragments=waiting + fragments)
                waiting = ()
    if waiting:
        yield Message(role="environment", fragments=waiting)


def _inserted(tokens: Sequence[tuple[Token, str]]) -> Iterator[tuple[str, tuple[Fragment, ...]]]:
    """Role and fragments of each message in inserted tokens. A token belongs to the stretch that its text begins in."""
    parts = list(stretches("".join(token.text for token, _ in tokens))) or [Stretch(text="")]
    ends = list(accumulate(len(part.text) for part in parts))
    offsets = accumulate((len(token.text) for token, _ in tokens), initial=0)
    marked = []
    for (token, shade), offset in zip(tokens, offsets, strict=False):
        stretch = parts[min(bisect_right(ends, offset), len(parts) - 1)]
        marked.append((stretch.role, _fragment(token, shade, stretch.is_markup)))
    for role, own in groupby(marked, key=lambda pair: pair[0]):
        yield role, tuple(fragment for _, fragment in own)


def _fragment(token: Token, shade: str, is_markup: bool) -> Fragment:
    return Fragment(text=token.text, is_markup=is_markup, shade=shade, title=token.title)


def _message(message: Mapping[str, Any]) -> Message:
    role, content = str(message.get("role", "?")), message.get("content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    details = json.dumps(rest, ensure_ascii=False, indent=1) if rest else ""
    return Message(role=role, fragments=(Fragment(text=text),), details=details)
