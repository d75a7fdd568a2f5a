"""The answers of a row of preferences as chats, from the best to the worst: of a pair, or of a ranked list.

{"prompt": "...", "answers": ["...", "..."], "ranks": [2, 1]}                      the lowest rank is the best
{"prompt": [messages], "answers": [[messages], [messages]], "scores": [3.5, 7.0]}  the highest score is the best
{"prompt": "...", "answers": [{"answer": "...", "rank": 1.0}, ...]}                Nectar
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from operator import eq
from typing import Any, TypeGuard, TypeVar

from skyrl.chats.contents import short
from skyrl.chats.text import Message
from skyrl.config import PreferenceConfig
from skyrl.data.row_forms import preference_chat
from skyrl.data.sources import Row
from skyrl.errors import DataError

T = TypeVar("T")

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def answers_of(row: Row, run: PreferenceConfig) -> list[list[Message]]:
    """The whole chats of a row's answers, from the best to the worst: two, or up to `num_answers`. Of a longer list for
    pairs they are the best and the worst. Raises `DataError`.
    """
    if row.get(run.answers_key) is None:
        chats = [preference_chat(row, key, run.prompt_key) for key in (run.chosen_key, run.rejected_key)]
        refuse_equal(chats, run)
        return chats
    ranked = _ranked(row, run)
    answers = [ranked[0], ranked[-1]] if run.num_answers == 2 else ranked
    if len(answers) > run.num_answers:
        raise DataError(f"{run.answers_key} has {len(answers)} answers, and num_answers is {run.num_answers}")
    parsed_row = {**row, run.prompt_key: _turns(row.get(run.prompt_key))}
    chats = [
        preference_chat({**parsed_row, run.answers_key: item}, run.answers_key, run.prompt_key) for item in answers
    ]
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
