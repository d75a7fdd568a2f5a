"""Writes products and differences of two-digit numbers, asked in words: tasks that the model cannot do in its head."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path("runs/smollm2-agent-base")
TRAINING_ROWS, VALIDATION_ROWS = 96, 16


def row(a: int, b: int, times: bool) -> dict[str, Any]:
    """One task, and its answer."""
    return {
        "prompt": [{"role": "user", "content": f"What is {a} {'times' if times else 'minus'} {b}?"}],
        "reward_spec": {"method": "rule", "ground_truth": str(a * b if times else a - b)},
    }


def main() -> None:
    """Both files, of different tasks."""
    pairs = [(a, b) for a in range(11, 100) for b in range(10, a)]
    drawn = random.Random(0).sample(pairs, TRAINING_ROWS + VALIDATION_ROWS)
    rows = [row(a, b, times=number % 2 == 0) for number, (a, b) in enumerate(drawn)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, part in (("validation", rows[:VALIDATION_ROWS]), ("train", rows[VALIDATION_ROWS:])):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    print(f"{FOLDER} holds train.jsonl and validation.jsonl")


if __name__ == "__main__":
    main()
