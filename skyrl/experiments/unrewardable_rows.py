"""Finds rows that cannot be rewarded: such a row is bad, and never a reward of 0.

A reward function needs values for the parameters that have no default. Without this check, a parameter such as
`ground_truth` would be None. A row has one ground truth, and a built-in environment can read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

from skyrl.config import SkyRLTrainConfig
from skyrl.data.prompts import Refuses, extras_of
from skyrl.data.sources import BadRow, Columns, answer_in, answered, iterate_rows
from skyrl.envs.group_rewards import GroupReward
from skyrl.envs.isolated import IsolatedTask
from skyrl.envs.mcp.environment import McpTask
from skyrl.envs.reference_answers import unreadable_truth_reason
from skyrl.envs.registry import PAIRWISE, MakeEnv, find_env_of_row
from skyrl.envs.reward_functions import PlainReward, lacking, required_columns
from skyrl.envs.rows import differing, ground_truths
from skyrl.envs.weighted_rewards import WeightedRewards
from skyrl.errors import DataError, Problem, TaskError
from skyrl.tree.frames import defined_at


class MissingColumn(str):
    """Reason why a row cannot be rewarded: no column of it has a value that its reward function needs."""

    __slots__ = ()


def unrewardable_reason(run: SkyRLTrainConfig) -> Refuses:
    """Function that gives the reason why a row cannot be rewarded; None if it can: its reward function has a value for
    each parameter, it has one ground truth, and a built-in environment can read that.

    Tasks that do not exist are ignored. Other environments check their rows themselves.
    """
    settings, column = run.environment, run.data.answer_column

    @cache
    def task_of(name: str) -> tuple[MakeEnv | None, tuple[str, ...], str]:
        try:
            make = find_env_of_row(name, settings.task, settings.skyrl_gym)
        except TaskError:  # another check reports it
            return None, (), ""
        return make, asked_by(make), name_of(make, name)

    def refuses(task: str, extras: Mapping[str, Any]) -> str | None:
        make, required, name = task_of(task)
        missing = lacking(required, extras)
        if missing:
            return MissingColumn(f"has no {' and no '.join(missing)}, which {name} needs")
        if make is None:
            return None
        answer = answer_in(extras, column) if column else None
        named = {} if answer is None else {f"{column} (data.answer_column)": answer}
        return differing({**ground_truths(extras), **named}) or unreadable_truth_reason(task, make, extras)

    return refuses


def asked_of_tasks(run: SkyRLTrainConfig) -> dict[str, tuple[str, ...]]:
    """Needs of each configured task, of its rows: stored prompts are made anew when they change."""
    settings = run.environment
    result = {}
    for name in {settings.task, *settings.names} - {None}:
        try:
            make = find_env_of_row(str(name), settings.task, settings.skyrl_gym)
        except TaskError:  # another check reports it
            continue
        result[str(name)] = (name_of(make, str(name)), *asked_by(make))
    return result


def asked_by(make: MakeEnv) -> tuple[str, ...]:
    """Parameters of a task's reward function that rows must have values for; none for environments."""
    match make:
        case PlainReward(function=function) | GroupReward(function=function):
            return required_columns(function)
        case IsolatedTask(asks=asks):
            return asks or ()
        case McpTask(reward=reward):
            return asked_by(reward)
        case WeightedRewards(parts=parts):
            return tuple(dict.fromkeys(name for part in parts for name in asked_by(part.make)))
    return ()


def name_of(make: MakeEnv, task: str) -> str:
    """A reward function in the form `reward.py:4 right_sum(completion, ground_truth)`; the name of other tasks."""
    if task == PAIRWISE:
        return task
    make = make.reward if isinstance(make, McpTask) else make
    function: Callable[..., Any] | None = make.function if isinstance(make, PlainReward | GroupReward) else None
    try:
        signature = inspect.signature(function) if function else None
    except (TypeError, ValueError):  # a builtin, of which nothing is known
        signature = None
    if signature is None:
        return task
    return f"{defined_at(function)} {getattr(function, '__name__', task)}{signature}".strip()


def columns_text(row: Mapping[str, Any]) -> str:
    """Names of a row's columns, for a message, with the keys of those that are tables: `reward_spec.ground_truth`."""
    names = [
        name
        for column, value in row.items()
        for name in ([f"{column}.{key}" for key in value] if value and isinstance(value, Mapping) else [column])
    ]
    return ", ".join(names[:_SHOWN_COLUMNS]) + (", ..." if len(names) > _SHOWN_COLUMNS else "")


_SHOWN_COLUMNS = 20
_SHOWN = 3


def unrewardable_rows(run: SkyRLTrainConfig, field: str, source: str, *, all_rows: bool) -> Iterator[Problem]:
    """Problem of the rows of a file that lack a value for their reward function: their number and the first ones; and
    warnings about ground truths of several kinds, and about empty ones.

    Without `all_rows`, only the first row is examined, and nothing is reported if the run itself skips and counts bad
    rows. Such rows end a run, unless bad rows are skipped and others remain.
    """
    skips, columns = run.data.bad_rows == "skip", Columns(prompt=run.data.prompt_column, answer=run.data.answer_column)
    if skips and not all_rows:
        return
    reasons: dict[int, str] = {}
    truths: dict[str, tuple[int, Any]] = {}  # row and value of the first of each kind
    columns_hint, empty = "", list[int]()
    rows, refuses = 0, unrewardable_reason(run)
    try:
        for index, row in enumerate(iterate_rows(source, columns) if all_rows else islice(iterate_rows(source), 1)):
            rows += 1
            if isinstance(row, BadRow):  # another check reports it
                continue
            try:
                full_row = answered(row, 0, "", columns)
            except DataError:
                continue
            task, extras = full_row.get("env_class") or run.environment.task, extras_of(full_row, columns)
            if isinstance(task, str) and (reason := refuses(task, extras)):
                if isinstance(reason, MissingColumn) and not reasons:
                    columns_hint = (
                        f"row {index} has {columns_text(row)}; data.answer_column names the column of the ground "
                        "truth; a parameter with a default needs no column"
                    )
                reasons[index] = reason
            empty += [index] if any(truth == "" for truth in ground_truths(extras).values()) else []
            for truth in ground_truths(extras).values():
                kind = "text" if isinstance(truth, str) else "number" if isinstance(truth, int | float) else ""
                truths.setdefault(kind, (index, truth))
    except (DataError, OSError):  # another check reports it
        return
    if reasons:
        yield Problem(
            path=field,
            message=_counted(source, reasons, rows) if all_rows else f"{source}, row 0 {reasons[0]}",
            hint="; ".join(filter(None, [columns_hint, "" if skips else "data.bad_rows = skip leaves such rows out"])),
            severity="warning" if skips and len(reasons) < rows else "error",
        )
    if empty and all_rows:
        message = f"{len(empty)} of {rows} ground truths of {source} are empty, the first in row {empty[0]}"
        hint = "no other answer than an empty one equals them"
        yield Problem(path=field, message=message, hint=hint, severity="warning")
    if {"text", "number"} <= truths.keys():  # few reward functions take both
        named = " and ".join(f"{truths[kind][1]!r:.60} (row {truths[kind][0]})" for kind in ("text", "number"))
        message = f"the ground truths of {source} are texts and numbers, such as {named}"
        hint = "make them all texts, or compare str(ground_truth)"
        yield Problem(path=field, message=message, hint=hint, severity="warning")


def _counted(source: str, reasons: Mapping[int, str], rows: int) -> str:
    row_names = [f"row {index}" for index in reasons]
    listing = ", ".join(row_names[:_SHOWN]) + (", ..." if len(row_names) > _SHOWN else "")
    return (
        f"{len(reasons)} of {rows} rows of {source} lack what their reward needs ({listing}): {row_names[0]} "
        f"{next(iter(reasons.values()))}"
    )
