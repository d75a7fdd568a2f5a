"""Writes pairs of answers to the sums of digits, a right one and a wrong one in the same words."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SUMS, FOLDER = Path("runs/smollm2-base"), Path("runs/smollm2-reward-base")
FORMS = ("{sum}", "{a} + {b} = {sum}", "The answer is {sum}.")


def pairs_of(row: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """A pair in each form of answer; the wrong one is off by at most four."""
    question, right = row["prompt"][0]["content"], int(row["reward_spec"]["ground_truth"])
    a, b = question.removeprefix("What is ").partition("?")[0].split(" + ")
    wrong = [rng.choice([right + by for by in (-4, -3, -2, -1, 1, 2, 3, 4) if right + by > 0]) for _ in FORMS]
    return [
        {
            "prompt": question,
            "chosen": form.format(a=a, b=b, sum=right),
            "rejected": form.format(a=a, b=b, sum=other),
        }
        for form, other in zip(FORMS, wrong, strict=True)
    ]


def main() -> None:
    """Pairs for training on the sums of training, and for evaluation on the others."""
    rng = random.Random(0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        rows = [json.loads(line) for line in (SUMS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        pairs = [pair for row in rows for pair in pairs_of(row, rng)]
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{FOLDER} holds train.jsonl and validation.jsonl")


if __name__ == "__main__":
    main()
