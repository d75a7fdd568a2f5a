"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in seconds.
"""

import random

from skyrl.starter.tiny_chat import make_task


def rows(count: int, rng: random.Random) -> list[dict[str, object]]:
    """A row is a chat; what the assistant says is learned."""
    return [{"messages": example(rng.randrange(5), rng.randrange(5))} for _ in range(count)]


def example(first: int, second: int) -> list[dict[str, str]]:
    """A question with its answer."""
    return [
        {"role": "user", "content": f"{first}+{second}="},
        {"role": "assistant", "content": str(first + second)},
    ]


if __name__ == "__main__":
    make_task(rows, training_rows=2048)
