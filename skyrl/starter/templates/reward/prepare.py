"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in half a minute.
"""

import random
from pathlib import Path

from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import byte_tokenizer, made_whole, save, seeded, small_qwen2, warm_start, write_rows

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


def main() -> None:
    """Make both folders, which get their names when both are complete."""
    rng = seeded(0)
    with made_whole(Path("data")) as data, made_whole(Path("model")) as folder:
        write_rows(data / "train.jsonl", rows(1024, rng))
        write_rows(data / "validation.jsonl", rows(128, rng))
        tokenizer = byte_tokenizer(length=64)
        model = small_qwen2(tokenizer, hidden_size=128, layers=2)
        warm_start(model, tokenizer, lambda: example(rng), steps=150, batch_size=64, lr=2e-3)
        save(model, tokenizer, folder)


if __name__ == "__main__":
    with stopped_in_words():
        main()
