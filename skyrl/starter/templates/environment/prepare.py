"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in half a minute.
"""

import random

from environment import hint

from skyrl.starter.tiny_chat import make_task

LISTENS = 0.3
"""Share of the examples whose second guess uses the hint; in the others it is any digit."""

PROMPT = {"role": "user", "content": "digit?"}


def rows(count: int, rng: random.Random) -> list[dict[str, object]]:
    """The columns of a task: a prompt, and what the environment needs."""
    return [
        {"data_source": "guess", "prompt": [PROMPT], "reward_spec": {"ground_truth": str(number % 10)}}
        for number in range(count)
    ]


def example(rng: random.Random) -> list[dict[str, str]]:
    """A guess, and after a wrong one a hint and a second guess."""
    secret, guess = rng.randrange(10), rng.randrange(10)
    first = [PROMPT, {"role": "assistant", "content": str(guess)}]
    if guess == secret:
        return first
    second = secret if rng.random() < LISTENS else rng.randrange(10)
    return [*first, {"role": "user", "content": hint(secret)}, {"role": "assistant", "content": str(second)}]


if __name__ == "__main__":
    make_task(rows, example, steps=200)
