"""Makes data and a small model, so that the task runs at once on a CPU. Remove it when you have your own.

    python prepare.py

Writes data/train.jsonl, data/validation.jsonl and model/, in about a minute.
"""

import random
from pathlib import Path

from tools import SHELVES

from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import (
    TOOL_TEMPLATE,
    byte_tokenizer,
    made_whole,
    save,
    seeded,
    small_qwen2,
    warm_start,
    write_rows,
)

OPENING, CLOSING = '<tool_call>{"name": "look", "arguments": {"shelf": "', '"}}</tool_call>'
LOOKS_WHERE_ASKED = 0.3
"""Share of the examples that look at the shelf of the question; the others look anywhere."""


def rows(count: int, rng: random.Random) -> list[dict[str, object]]:
    """The columns of a task: a prompt, the answer, and what the tool looks up."""
    return [row(rng.choice(SHELVES), str(rng.randrange(10))) for _ in range(count)]


def row(shelf: str, thing: str) -> dict[str, object]:
    """A question about one shelf; the others are empty."""
    return {
        "data_source": "shelves",
        "prompt": [{"role": "user", "content": shelf}],
        "reward_spec": {"ground_truth": thing},
        "shelves": {shelf: thing},
    }


def example(rng: random.Random) -> list[dict[str, str]]:
    """A question, a call, its result and an answer; what an empty shelf is answered with is any digit."""
    shelf, thing = rng.choice(SHELVES), str(rng.randrange(10))
    looked = shelf if rng.random() < LOOKS_WHERE_ASKED else rng.choice(SHELVES)
    found = thing if looked == shelf else "nothing"
    return [
        {"role": "system", "content": "look"},  # as the template shows the tools
        {"role": "user", "content": shelf},
        {"role": "assistant", "content": OPENING + looked + CLOSING},
        {"role": "tool", "content": found},
        {"role": "assistant", "content": found if found != "nothing" else str(rng.randrange(10))},
    ]


def main() -> None:
    """Make both folders, which get their names when both are complete."""
    rng = seeded(0)
    with made_whole(Path("data")) as data, made_whole(Path("model")) as folder:
        write_rows(data / "train.jsonl", rows(1024, rng))
        write_rows(data / "validation.jsonl", rows(128, rng))
        words = [OPENING, CLOSING, "<|system|>", "<|tool|>", "nothing", "look"]
        tokenizer = byte_tokenizer(length=64, words=words, template=TOOL_TEMPLATE)
        model = small_qwen2(tokenizer, hidden_size=128, layers=2)
        warm_start(model, tokenizer, lambda: example(rng), steps=300, batch_size=64, lr=2e-3)
        save(model, tokenizer, folder)


if __name__ == "__main__":
    with stopped_in_words():
        main()
