"""Finds ground truths that an environment cannot read, so that no answer of the policy would be right.

A built-in environment that reads answers is given one that states the row's ground truth: it has to get reward 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from skyrl.envs.env import Env
from skyrl.envs.rows import ground_truths
from skyrl.envs.search import targets
from skyrl.errors import TaskError, WorkerEnded

ANSWER_FORMATS = {
    "aime": "\\boxed{{{0}}} Answer: {0}",
    "gsm8k": "\\boxed{{{0}}} #### {0}",
    "gsm8k_multi_turn": "#### {0}",
    "multiply": "\\boxed{{{0}}}",
    "search": "<answer>{0}</answer>",
    "searchcode": "<solution>#### {0}</solution>",
}
"""For each environment that reads answers, the form in which an answer states a ground truth."""


def unreadable_truth_reason(
    task: str, make: Callable[[Mapping[str, Any]], Env], extras: Mapping[str, Any]
) -> str | None:
    """Reason why no answer to this row can be right in the environment `task`; None if its ground truth can be read, or
    if the environment does not read answers.
    """
    if (form := ANSWER_FORMATS.get(task)) is None:
        return None
    truth = next(iter(ground_truths(extras).values()), None)
    try:
        env = make(deepcopy(dict(extras)))
        stated = next(iter(targets(truth)), "") if task == "search" and truth is not None else truth
        answer = form.format(str(stated).strip())
        reward = env.step(answer).reward
    except TaskError as error:
        return f"is refused: {error}"
    except WorkerEnded:  # mathematics that takes too long to compare
        return None
    if reward >= 1:
        return None
    return f"has the ground truth {truth!r:.80}, which {task} cannot read: {answer!r:.100} gets the reward {reward:g}"
