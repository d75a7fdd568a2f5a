"""Samples answers to the sums, and writes pairs of a right and a wrong one to the same prompt."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

SUMS, FOLDER = Path("runs/smollm2-base"), Path("runs/smollm2-reward-base")
SAMPLES_PER_PROMPT, MOST_PAIRS = 12, 4


def samples(name: str) -> list[dict[str, Any]]:
    """Answers of the model as it was fetched, each with its reward."""
    folder = FOLDER / name
    changes = [f"data.val_data={SUMS / name}.jsonl", f"generator.eval_n_samples_per_prompt={SAMPLES_PER_PROMPT}"]
    model, file = str(SUMS / "model"), "examples/smollm2/grpo.toml"
    command = [sys.executable, "-m", "skyrl.cli", "eval", model, file, *changes, "--to", str(folder)]
    subprocess.run(command, check=True)
    lines = (folder / "samples" / "sums.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def pairs(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most four pairs for a prompt; none where all of its answers are right, or all wrong."""
    by_prompt: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for answer in answers:
        by_prompt[answer["prompt_id"]].append(answer)
    rng = random.Random(0)
    pairs = []
    for own in by_prompt.values():
        right = [answer for answer in own if answer["reward"] == 1]
        wrong = [answer for answer in own if answer["reward"] == 0]
        for worse in wrong[:MOST_PAIRS] if right else []:
            better = rng.choice(right)
            chosen, rejected = (answer["response"].removesuffix("<|im_end|>") for answer in (better, worse))
            pairs.append({"prompt": worse["prompt"], "chosen": chosen, "rejected": rejected})
    return pairs


def main() -> None:
    """Pairs for training on the sums of training, and for evaluation on the others."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        rows = pairs(samples(name))
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in rows), encoding="utf-8")
        print(f"{FOLDER}/{name}.jsonl holds {len(rows)} pairs")


if __name__ == "__main__":
    main()
