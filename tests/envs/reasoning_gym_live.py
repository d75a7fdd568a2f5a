"""Every task of reasoning-gym 0.1.25 through the environment: `python -m tests.envs.reasoning_gym_live [TASK...]`.

It needs the package, of which parts are compiled from C: the suite has a stand-in (`test_reasoning_gym.py`). Of each
task, the reference answer scores 1, a wrong and an empty one less.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from reasoning_gym.factory import DATASETS

from skyrl.config.foundation.reasoning_tasks import REASONING_GYM, task_rows
from skyrl.data.reasoning_rows import _rows
from skyrl.envs import find_env
from skyrl.errors import DataError

WRONG = "I do not know"
ROWS = 2

REFERENCES: Mapping[str, Callable[[Any], str]] = {
    "graph_color": lambda entry: json.dumps(entry["metadata"]["possible_answer"]),
    "propositional_logic": lambda entry: entry["metadata"]["example_answer"],
    "rubiks_cube": lambda entry: entry["metadata"]["example_correct_answer"],
}
"""Tasks without a reference answer, whose entries hold a right answer elsewhere."""

NO_REFERENCE = {
    "boxnet": "its entries have no plan; the score is the share of boxes that a plan delivers",
    "rush_hour": "its entries have the number of moves, not the moves",
}
REFUSED = {"game_of_life_halting": "its score_answer compares bool(answer), so that every text is right"}


def main(tasks: Sequence[str]) -> int:
    """Print the scores of each task, and return the number of tasks with others than expected."""
    unexpected = 0
    for task in tasks or sorted(set(DATASETS) - {"composite"}):
        task_source = task_rows(f"reasoning_gym://{task}?rows={ROWS}&size=50")
        try:
            rows = [json.loads(json.dumps(row)) for row in islice(_rows(task_source), ROWS)]
        except DataError as error:
            unexpected += task not in REFUSED
            print(f"{task}: {error}", flush=True)
            continue
        scores = [[_score(row, answer) for answer in (reference(task, row), WRONG, "")] for row in rows]
        right = all(
            (reference_score == 1 or task in NO_REFERENCE) and max(others) < 1 for reference_score, *others in scores
        )
        unexpected += not right or task in REFUSED
        print(f"{task}: {scores}{'' if right else ' UNEXPECTED'}", flush=True)
    print(f"{unexpected} tasks are not as expected")
    return unexpected


def reference(task: str, row: Mapping[str, Any]) -> str:
    """The right answer to a row; empty for tasks that have none."""
    if task in REFERENCES:
        return REFERENCES[task](ast.literal_eval(row[REASONING_GYM]["entry"]))
    return str(row["reward_spec"]["ground_truth"]) if task not in NO_REFERENCE else ""


def _score(row: Mapping[str, Any], answer: str) -> float:
    return find_env("reasoning_gym")(row).step(answer).reward


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
