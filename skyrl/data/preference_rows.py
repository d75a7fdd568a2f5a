"""Rows of preference runs: pairs of answers, ranked lists, and single answers with labels for KTO.

Log-probabilities of a reference are computed once for all rows of a data set and stored as one file of float32.

{"prompt": "...", "chosen": "...", "rejected": "..."}                     answers to a user's text
{"prompt": [messages], "chosen": [messages], "rejected": [messages]}      answers to a chat
{"chosen": [messages], "rejected": [messages]}                            whole chats that begin with the same messages
{"prompt": "...", "chosen": [messages], "rejected": [messages]}           UltraFeedback: whole chats and their prompt

{"prompt": "...", "answers": ["...", "..."], "ranks": [2, 1]}                      the lowest rank is the best
{"prompt": [messages], "answers": [[messages], [messages]], "scores": [3.5, 7.0]}  the highest score is the best
{"prompt": "...", "answers": [{"answer": "...", "rank": 1.0}, ...]}                Nectar

{"prompt": "...", "completion": "...", "label": true}                     an answer to a user's text
{"prompt": [messages], "completion": [messages], "label": false}          an answer to a chat
{"completion": [messages], "label": true}                                 a whole chat, whose last answer is judged
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import combinations, pairwise
from operator import eq
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from skyrl.chats.contents import ALLOW_DROPPED, short
from skyrl.chats.masks import ChatMasks, Ids, Mask
from skyrl.chats.text import Message
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import PreferenceConfig
from skyrl.data.conversations import refuse_media, tools_of, with_system
from skyrl.data.row_forms import label_of, preference_chat
from skyrl.data.row_store import RowsOnAccess
from skyrl.data.sources import Row
from skyrl.data.supervised_rows import RowReader, TokenizedRows, count_blanks, load_rows
from skyrl.data.tokenized_rows import LabelledRow, PairRow, RankedRow
from skyrl.errors import DataError

T = TypeVar("T")
R = TypeVar("R", PairRow, RankedRow, LabelledRow)

_LOGPROB = np.dtype("<f4")

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def load_preference_rows(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> TokenizedRows[Any]:
    """Every row of the sources, tokenized: pairs, ranked lists, or single answers, as the losses want them. Raises
    `DataError` for a bad row if `bad_rows` says so, and if no row is left.
    """
    kind: Any = LabelledRow if run.unpaired else PairRow if run.num_answers == 2 else RankedRow
    return load_rows(preference_rows_reader(sources, tokenizer, run, max_length), tokenizer, kind)


def preference_rows_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> RowReader[Any]:
    """Reads rows as `load_preference_rows` does."""
    reader = labelled_reader if run.unpaired else answers_reader
    return reader(sources, tokenizer, run, max_length)


def labelled_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> RowReader[LabelledRow]:
    """Reads single answers with labels. The last message of the assistant is the answer."""
    masks = ChatMasks(tokenizer, arguments=run.chat_template_kwargs)

    def read(row: Row, row_id: str) -> LabelledRow:
        refuse_media(row)
        chat = with_system(preference_chat(row, run.completion_key, run.prompt_key), row.get(run.system_key))
        tools = tools_of(row.get(run.tools_key), run.tools_key)
        ids, mask = masks(chat, tools, allow_dropped=bool(row.get(ALLOW_DROPPED)))
        mask[:1] = False  # nothing predicts the first token
        if not mask.any():
            raise DataError("the answer has no token")
        return LabelledRow(id=row_id, token_ids=ids, mask=mask, label=label_of(row.get(run.label_key), run.label_key))

    return RowReader(run, tuple(sources), max_length, read, count_blanks(masks))


def answers_reader(
    sources: Sequence[str], tokenizer: ChatTokenizer, run: PreferenceConfig, max_length: int
) -> RowReader[Any]:
    """Reads pairs, or ranked lists. A row of which a sequence is too long is left out and counted, never cut."""
    tokens_of = AnswerForms(tokenizer, run)

    def read(row: Row, row_id: str) -> PairRow | RankedRow:
        sides = tokens_of(row)
        if run.num_answers > 2:
            return RankedRow(id=row_id, sides=tuple(sides))
        (chosen, chosen_mask), (rejected, rejected_mask) = sides
        return PairRow(
            id=row_id, chosen=chosen, rejected=rejected, chosen_mask=chosen_mask, rejected_mask=rejected_mask
        )

    return RowReader(run, tuple(sources), max_length, read, count_blanks(tokens_of.masks))


class AnswerForms:
    """Tokenizes the answers of rows, whatever their form."""

    def __init__(self, tokenizer: ChatTokenizer, run: PreferenceConfig) -> None:
        """`tokenizer` has the run's chat template."""
        self.masks, self._run = ChatMasks(tokenizer, all_messages=True, arguments=run.chat_template_kwargs), run

    def __call__(self, row: Row) -> list[tuple[Ids, Mask]]:
        """Tokens of the sequences from the best to the worst, each with a mask of its answer: the assistant's messages
        that follow what all chats begin with. Raises `DataError`.
        """
        refuse_media(row)
        chats = answers_of(row, self._run)
        prompt = min(common_messages(chats[0], other) for other in chats[1:])
        with self.masks.one_prompt():
            sequences = [self._tokens(chat, prompt, row) for chat in chats]
        refuse_equal([ids for ids, _ in sequences], self._run, np.array_equal)  # texts may differ, and their tokens not
        _refuse_other_prompts(chats, prompt)
        return sequences

    def _tokens(self, chat: list[Message], prompt: int, row: Row) -> tuple[Ids, Mask]:
        run = self._run
        marked: list[Message] = [{**message, "weight": float(index >= prompt)} for index, message in enumerate(chat)]
        messages = with_system(marked, row.get(run.system_key))
        tools = tools_of(row.get(run.tools_key), run.tools_key)
        ids, mask = self.masks(messages, tools, allow_dropped=bool(row.get(ALLOW_DROPPED)))
        mask[:1] = False  # nothing predicts the first token
        if not mask.any():
            raise DataError("an answer has no token")
        return ids, mask


def _refuse_other_prompts(chats: Sequence[Sequence[Message]], common: int) -> None:
    """Raises `DataError` if the chats of a row, of which `common` messages are the same, differ before the assistant
    has said anything.
    """
    if any(message.get("role") == "assistant" for message in chats[0][:common]):
        return
    (role, content), *others = [(chat[common].get("role"), chat[common].get("content")) for chat in chats]
    if any(other != (role, content) and (other[0], role) != ("assistant", "assistant") for other in others):
        raise DataError(
            f"its chats differ before the answers, in a message of {role} ({short(content)}): all answers of a row "
            "have the same prompt"
        )


def common_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Number of messages that both chats begin with, at most one less than the shorter has."""
    count = min(len(one), len(other)) - 1
    return next((index for index in range(count) if one[index] != other[index]), count)


def answers_of(row: Row, run: PreferenceConfig) -> list[list[Message]]:
    """The whole chats of a row's answers, from the best to the worst: two, or up to `num_answers`. Of a longer list for
    pairs they are the best and the worst. Raises `DataError`.
    """
    if row.get(run.answers_key) is None:
        chats = [preference_chat(row, key, run.prompt_key) for key in (run.chosen_key, run.rejected_key)]
    else:
        ranked = _ranked(row, run)
        answers = [ranked[0], ranked[-1]] if run.num_answers == 2 else ranked
        if len(answers) > run.num_answers:
            raise DataError(f"{run.answers_key} has {len(answers)} answers, and num_answers is {run.num_answers}")
        row = {**row, run.prompt_key: _turns(row.get(run.prompt_key))}
        chats = [preference_chat({**row, run.answers_key: item}, run.answers_key, run.prompt_key) for item in answers]
    refuse_equal(chats, run)
    return chats


def refuse_equal(answers: Sequence[T], run: PreferenceConfig, are_equal: Callable[[T, T], object] = eq) -> None:
    """Raises `DataError` if two of a row's answers, from the best to the worst, are the same."""
    for (one, first), (other, second) in combinations(enumerate(answers, 1), 2):
        if are_equal(first, second):
            names = f"{run.chosen_key} and {run.rejected_key}"
            raise DataError(f"{names if len(answers) == 2 else f'answers {one} and {other} by rank'} are the same")


def _ranked(row: Row, run: PreferenceConfig) -> list[object]:
    """The answers of a list from the best to the worst. Raises `DataError` if their order is not known."""
    value = row[run.answers_key]
    if not _is_list(value) or len(value) < 2:
        raise DataError(f"{run.answers_key} is {short(value)}, not a list of two or more answers")
    answers, numbers, key = list(value), row.get(run.ranks_key), run.ranks_key
    if all(isinstance(answer, Mapping) and "answer" in answer for answer in answers):
        numbers = [entry.get("rank") for entry in answers] if numbers is None else numbers
        answers = [answer["answer"] for answer in answers]
    for index, item in enumerate(answers):
        if isinstance(item, Mapping):
            raise DataError(f"answer {index} in {run.answers_key} has no text under answer: {short(item)}")
    falls = numbers is None or (_is_list(numbers) and all(number is None for number in numbers))
    if falls:
        numbers, key = row.get(run.scores_key), run.scores_key
    if not _is_list(numbers) or len(numbers) != len(answers):
        raise DataError(
            f"there is no number in {run.ranks_key} or {run.scores_key} for each of the {len(answers)} answers "
            f"({run.answers_key})"
        )
    if not all(type(number) in (int, float) and number == number for number in numbers):
        raise DataError(f"{key} is {short(numbers)}, not a list of numbers")
    order = sorted(range(len(answers)), key=lambda i: -numbers[i] if falls else numbers[i])
    compared = [order[0], order[-1]] if run.num_answers == 2 else order
    for one, other in pairwise(compared):
        if numbers[one] == numbers[other]:
            raise DataError(f"answers {one} and {other} are both {numbers[one]:g} in {key}: neither is better")
    return [answers[i] for i in order]


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _turns(prompt: object) -> object:
    """A prompt as messages if it is written as in Nectar, as turns of `Human:` and `Assistant:` after blank lines."""
    if not isinstance(prompt, str) or not _TURN.match(prompt):
        return prompt
    _, *parts = _TURN.split(prompt)
    turns = [
        {"role": _ROLES[speaker], "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return turns if turns[-1]["content"] else turns[:-1]


class ReferencedRows(RowsOnAccess[R]):
    """Rows with the stored log-probabilities of their answers, each read on access."""

    def __init__(self, rows: Sequence[R], file: Path) -> None:
        """`file` is one that `store_logprobs` wrote for these rows. Raises `DataError` for any other."""
        self._rows: Sequence[R] = rows
        self._ends = np.cumsum([row.answer_tokens for row in rows])
        try:
            self._logprobs = np.memmap(file, _LOGPROB, "r")
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read ({error}): delete it, and it is computed again") from error
        if len(self._logprobs) != self._ends[-1]:
            raise DataError(f"{file} is damaged: delete it, and it is computed again")

    def __len__(self) -> int:
        return len(self._rows)

    def read_row(self, index: int) -> R:
        start = int(self._ends[index - 1]) if index else 0
        logprobs = np.array(self._logprobs[start : int(self._ends[index])], dtype=np.float32)
        row: R = self._rows[index]
        return attrs.evolve(row, ref_logprobs=logprobs)


def logprobs_file(folder: Path, fingerprint: str, reference: Iterable[object]) -> Path:
    """The file for rows with this fingerprint and a reference with these marks, such as digests of its weights."""
    key = sha256(repr((fingerprint, *reference)).encode()).hexdigest()[:32]
    return folder / f"{key}.f32"


def store_logprobs(file: Path, logprobs: Sequence[NDArray[np.float32]]) -> None:
    """Write the log-probabilities of all rows, whole or not at all. Raises `DataError` if they cannot be written."""
    scratch = file.with_suffix(f".{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.concatenate(logprobs).astype(_LOGPROB).tofile(scratch)
        scratch.replace(file)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise DataError(f"log-probabilities of the reference cannot be stored in {file.parent}: {error}") from error
