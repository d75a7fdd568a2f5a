"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in half a minute.
"""

import random

from skyrl.starter.tiny_chat import make_task

RIGHT = 0.3
"""Share of right answers among the examples that the model starts from; the others end in a full stop."""

PAIRS = [(first, second) for first in range(5) for second in range(5)]
HELD_OUT = PAIRS[3::6]
"""Sums for validation. Training does not see them."""


def question(first: int, second: int) -> list[dict[str, str]]:
    """A prompt is a chat."""
    return [{"role": "user", "content": f"{first}+{second}="}]


def row(first: int, second: int) -> dict[str, object]:
    """The columns of a task: a prompt, and what the reward needs."""
    return {
        "data_source": "sums",
        "prompt": question(first, second),
        "reward_spec": {"ground_truth": str(first + second)},
    }


def example(rng: random.Random) -> list[dict[str, str]]:
    """A question with an answer that is the number alone, or ends in a full stop."""
    pair = rng.choice(PAIRS)
    answer = f"{sum(pair)}{'' if rng.random() < RIGHT else '.'}"
    return [*question(*pair), {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    make_task(
        [row(*pair) for pair in PAIRS if pair not in HELD_OUT],
        [row(*pair) for pair in HELD_OUT],
        example,
        steps=150,
    )
