"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in about a minute.
"""

import random

from agent import SHELVES

from skyrl.starter.shelves import WORDS, shelf_example, shelf_row
from skyrl.starter.tiny_chat import TOOL_TEMPLATE, make_task


def rows(count: int, rng: random.Random) -> list[dict[str, object]]:
    """The columns of a task: a prompt, the answer, and what the agent is told."""
    pairs = [(rng.choice(SHELVES), str(rng.randrange(10))) for _ in range(count)]
    return [shelf_row(shelf, thing, extra_info={"shelf": shelf}) for shelf, thing in pairs]


if __name__ == "__main__":
    make_task(
        rows,
        lambda rng: shelf_example(SHELVES, rng),
        validation_rows=64,
        steps=300,
        words=WORDS,
        template=TOOL_TEMPLATE,
    )
