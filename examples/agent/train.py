"""Makes a small model that rarely finds anything, and trains it with the agent.

python examples/agent/train.py [PATH=VALUE...]
"""

from __future__ import annotations

import random
from pathlib import Path

from skyrl.starter.tiny_chat import (
    TOOL_TEMPLATE,
    Conversation,
    byte_tokenizer,
    make_once,
    save,
    seeded,
    small_qwen2,
    train,
    warm_start,
    write_rows,
)

BASE = Path("runs/agent-base")
SHELVES = "abcdefgh"
OPENING, CLOSING = '<tool_call>{"name": "look", "arguments": {"shelf": "', '"}}</tool_call>'
LOOKS_WHERE_ASKED = 0.3
"""Share of the supervised conversations that look at the shelf they were asked about; the others look anywhere."""


def question(shelf: str) -> dict[str, str]:
    """The prompt about a shelf."""
    return {"role": "user", "content": shelf}


def conversation(rng: random.Random) -> Conversation:
    """A question, a look at a shelf, and an answer; an empty shelf is answered with any digit."""
    shelf, thing = rng.choice(SHELVES), str(rng.randrange(10))
    looked = shelf if rng.random() < LOOKS_WHERE_ASKED else rng.choice(SHELVES)
    result = thing if looked == shelf else "nothing"
    return [
        {"role": "system", "content": "look"},
        question(shelf),
        {"role": "assistant", "content": OPENING + looked + CLOSING},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result if result != "nothing" else str(rng.randrange(10))},
    ]


def rows(rng: random.Random, count: int) -> list[dict[str, object]]:
    """Tasks: a shelf, and what lies on it, which the model is not told."""
    drawn = [(rng.choice(SHELVES), str(rng.randrange(10))) for _ in range(count)]
    return [
        {
            "data_source": "shelves",
            "prompt": [question(shelf)],
            "extra_info": {"shelf": shelf},
            "reward_spec": {"method": "rule", "ground_truth": thing},
        }
        for shelf, thing in drawn
    ]


def make(folder: Path) -> None:
    """Fill the folder with data and a model."""
    rng = seeded(0)
    write_rows(folder / "train.jsonl", rows(rng, 1024))
    write_rows(folder / "validation.jsonl", rows(rng, 64))
    words = [OPENING, CLOSING, "<|system|>", "<|tool|>", "nothing", "look"]
    tokenizer = byte_tokenizer(length=64, words=words, template=TOOL_TEMPLATE)
    model = small_qwen2(tokenizer, hidden_size=128, layers=2)
    warm_start(model, tokenizer, lambda: conversation(rng), steps=300, batch_size=64, lr=2e-3)
    save(model, tokenizer, folder / "model")


if __name__ == "__main__":
    make_once(BASE, make)
    train(Path(__file__).with_name("grpo.toml"))
