"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in half a minute.
"""

import random

from environment import hint

from skyrl.starter.tiny_chat import make_task

LISTENS = 0.3
"""Share of the examples whose second guess uses the hint; in the others it is any digit."""

BOXES = [(box, secret) for box in "ABCDEFGH" for secret in range(10)]
HELD_OUT = BOXES[5::9]
"""Boxes for validation, each with the digit in it. Training does not see them."""


def question(box: str) -> dict[str, str]:
    """Which digit is in the box?"""
    return {"role": "user", "content": f"{box}?"}


def row(box: str, secret: int) -> dict[str, object]:
    """The columns of a task: a prompt, and what the environment needs."""
    return {"data_source": "guess", "prompt": [question(box)], "reward_spec": {"ground_truth": str(secret)}}


def example(rng: random.Random) -> list[dict[str, str]]:
    """A guess, and after a wrong one a hint and a second guess."""
    (box, secret), guess = rng.choice(BOXES), rng.randrange(10)
    first = [question(box), {"role": "assistant", "content": str(guess)}]
    if guess == secret:
        return first
    second = secret if rng.random() < LISTENS else rng.randrange(10)
    return [*first, {"role": "user", "content": hint(secret)}, {"role": "assistant", "content": str(second)}]


if __name__ == "__main__":
    make_task(
        [row(*item) for item in BOXES if item not in HELD_OUT],
        [row(*entry) for entry in HELD_OUT],
        example,
        steps=200,
    )
