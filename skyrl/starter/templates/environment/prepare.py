"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in half a minute.
"""

import random
from pathlib import Path

from environment import hint

from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import byte_tokenizer, made_whole, save, seeded, small_qwen2, warm_start, write_rows

LISTENS = 0.3
"""Share of the examples whose second guess uses the hint; in the others it is any digit."""

PROMPT = {"role": "user", "content": "digit?"}


def rows(count: int) -> list[dict[str, object]]:
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


def main() -> None:
    """Make both folders, which get their names when both are complete."""
    rng = seeded(0)
    with made_whole(Path("data")) as data, made_whole(Path("model")) as folder:
        write_rows(data / "train.jsonl", rows(1024))
        write_rows(data / "validation.jsonl", rows(128))
        tokenizer = byte_tokenizer(length=64)
        model = small_qwen2(tokenizer, hidden_size=128, layers=2)
        warm_start(model, tokenizer, lambda: example(rng), steps=200, batch_size=64, lr=2e-3)
        save(model, tokenizer, folder)


if __name__ == "__main__":
    with stopped_in_words():
        main()
