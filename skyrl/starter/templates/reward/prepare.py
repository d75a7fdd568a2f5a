"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in half a minute.
"""

import random

from skyrl.starter.tiny_chat import make_task

RIGHT = 0.3
"""Share of right answers among the examples that the model starts from; the others are one too many."""


def question(first: int, second: int) -> list[dict[str, str]]:
    """A prompt is a chat."""
    return [{"role": "user", "content": f"{first}+{second}="}]


def rows(count: int, rng: random.Random) -> list[dict[str, object]]:
    """The columns of a task: a prompt, and what the reward needs."""
    pairs = [(rng.randrange(5), rng.randrange(5)) for _ in range(count)]
    return [
        {"data_source": "sums", "prompt": question(*pair), "reward_spec": {"ground_truth": str(sum(pair))}}
        for pair in pairs
    ]


def example(rng: random.Random) -> list[dict[str, str]]:
    """A question with an answer that is right or one too many."""
    pair = (rng.randrange(5), rng.randrange(5))
    answer = sum(pair) + (rng.random() >= RIGHT)
    return [*question(*pair), {"role": "assistant", "content": str(answer)}]


if __name__ == "__main__":
    make_task(rows, example, steps=150)
