"""Writes sums of two-digit numbers: worked out for supervised training, asked for reinforcement learning."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path("runs/smollm2-sft-base")
SFT_ROWS, TRAINING_ROWS, VALIDATION_ROWS = 144, 192, 32


def question(a: int, b: int) -> list[dict[str, str]]:
    """The prompt of a sum."""
    return [{"role": "user", "content": f"Add {a} and {b}, ones first."}]


def worked_out(a: int, b: int) -> str:
    """The ones, the tens with what is carried, and the sum: `4 + 9 = 13, 3 + 5 + 1 = 9, 93` for 34 and 59."""
    ones, tens = a % 10 + b % 10, f"{a // 10} + {b // 10}"
    if ones > 9:
        tens += " + 1"
    return f"{a % 10} + {b % 10} = {ones}, {tens} = {(a + b) // 10}, {a + b}"


def chat(a: int, b: int) -> dict[str, Any]:
    """A row of supervised training."""
    return {"messages": [*question(a, b), {"role": "assistant", "content": worked_out(a, b)}]}


def task(a: int, b: int) -> dict[str, Any]:
    """A row of reinforcement learning."""
    return {"prompt": question(a, b), "reward_spec": {"method": "rule", "ground_truth": str(a + b)}}


def main() -> None:
    """Three files without a sum in common."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make, count in (
        ("validation", task, VALIDATION_ROWS),
        ("train", task, TRAINING_ROWS),
        ("chats", chat, SFT_ROWS),
    ):
        drawn, pairs = pairs[:count], pairs[count:]
        lines = "".join(json.dumps(make(a, b)) + "\n" for a, b in drawn)
        (FOLDER / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(f"{FOLDER} holds chats.jsonl, train.jsonl and validation.jsonl")


if __name__ == "__main__":
    main()
