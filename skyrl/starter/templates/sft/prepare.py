"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in seconds.
"""

import random
from pathlib import Path

from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import byte_tokenizer, made_whole, save, seeded, small_qwen2, write_rows


def rows(count: int, rng: random.Random) -> list[dict[str, object]]:
    """A row is a chat; what the assistant says is learned."""
    return [{"messages": example(rng.randrange(5), rng.randrange(5))} for _ in range(count)]


def example(first: int, second: int) -> list[dict[str, str]]:
    """A question with its answer."""
    return [
        {"role": "user", "content": f"{first}+{second}="},
        {"role": "assistant", "content": str(first + second)},
    ]


def main() -> None:
    """Make both folders, which get their names when both are complete."""
    rng = seeded(0)
    with made_whole(Path("data")) as data, made_whole(Path("model")) as folder:
        write_rows(data / "train.jsonl", rows(2048, rng))
        write_rows(data / "validation.jsonl", rows(128, rng))
        tokenizer = byte_tokenizer(length=64)
        save(small_qwen2(tokenizer, hidden_size=128, layers=2), tokenizer, folder)


if __name__ == "__main__":
    with stopped_in_words():
        main()
