"""Rows of tasks of reasoning-gym, drawn in a process of their own: `python -m skyrl.data.reasoning_rows`.

Some tasks choose from sets of texts, whose order Python draws anew in each process. The drawing process fixes that
order (PYTHONHASHSEED), so that a resumed run finds the rows it began with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from attrs import asdict

from skyrl.config.foundation.reasoning_tasks import REASONING_GYM, TaskRows, refusal, task_rows
from skyrl.errors import DataError

_WRONG = "no such answer"
"""A text that is a wrong answer to every task."""


@lru_cache(maxsize=16)
def read_reasoning_rows(source: str) -> tuple[Mapping[str, Any], ...]:
    """The rows of a source. Raises `DataError` if the package is missing, refuses the settings, or has too few
    different questions.
    """
    if reason := refusal(source):
        raise DataError(reason)
    request = task_rows(source)
    python = [sys.executable, "-P", "-m", "skyrl.data.reasoning_rows"]
    paths = os.pathsep.join(path for path in sys.path if path)
    drawn = subprocess.run(
        python,
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths},
        check=False,
    )
    if drawn.returncode:
        reason = (drawn.stderr.strip().splitlines() or ["its process ended"])[-1].removeprefix("DataError: ")
        raise DataError(f"{source}: reasoning-gym draws no rows: {reason[:500]}")
    rows = tuple(map(json.loads, drawn.stdout.splitlines()))
    if len(rows) < request.rows:
        raise DataError(
            f"{source}: the first {request.settings['size']} rows of {request.task} have "
            f"{request.skip + len(rows) if rows else f'at most {request.skip}'} different questions, and "
            f"{request.skip + request.rows} are needed: lower train_rows or eval_rows, or widen the task's settings"
        )
    return rows


def _rows(request: TaskRows) -> Iterator[Mapping[str, Any]]:
    """Draw the rows, with the package."""
    from reasoning_gym.factory import create_dataset
    from reasoning_gym.utils import SYSTEM_PROMPTS

    first = [] if request.system_prompt is None else [("system", SYSTEM_PROMPTS[request.system_prompt].strip())]
    stream = create_dataset(request.task, **request.settings)
    for index, entry in enumerate(islice(_different(stream), request.skip, None)):
        if index == 0 and _is_right(stream, _WRONG, entry):  # game_of_life_halting, in 0.1.25
            raise DataError(
                f"{request.task} cannot be learned: its score_answer gives {_WRONG!r} the score of a right answer"
            )
        chat = [*first, ("user", entry["question"])]
        truth = {} if entry["answer"] is None else {"reward_spec": {"method": "rule", "ground_truth": entry["answer"]}}
        yield {
            "prompt": [{"role": role, "content": content} for role, content in chat],
            **({"env_class": REASONING_GYM} if request.names_environment else {}),
            "data_source": request.task,
            **truth,
            REASONING_GYM: {"task": request.task, "settings": request.settings, "entry": repr(_literal(entry))},
        }


def _is_right(stream: Any, answer: str, entry: Mapping[str, Any]) -> bool:
    try:
        return bool(stream.score_answer(answer, entry) >= 1)
    except Exception:  # noqa: BLE001 - some tasks evaluate the answer, and raise what that raises
        return False


def _different(stream: Any) -> Iterator[Mapping[str, Any]]:
    """The entries of a stream whose question is new."""
    seen: set[str] = set()
    for index in range(stream.config.size):
        entry = stream[index]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield entry


def _literal(value: Any) -> Any:
    """The value with numpy's scalars as Python's: what `ast.literal_eval` reads from its `repr`."""
    match value:
        case dict():
            return {_literal(key): _literal(item) for key, item in value.items()}
        case list() | tuple() | set():
            return type(value)(map(_literal, value))
        case str() | bytes() | bool() | int() | float() | complex() | None if type(value).__module__ == "builtins":
            return value
        case _ if hasattr(value, "item"):
            return value.item()
    raise DataError(f"an entry has a value of type {type(value).__name__}, which a row cannot hold")


def main() -> None:
    """Print the rows that standard input asks for, one in a line."""
    request = TaskRows(**json.load(sys.stdin))
    rows, sys.stdout = sys.stdout, sys.stderr  # what a task prints is not a row
    for row in islice(_rows(request), request.rows):
        rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    try:
        main()
    except Exception as failure:  # noqa: BLE001 - tasks raise whatever they like; the caller reports the last line
        sys.exit(f"{type(failure).__name__}: {failure}")
