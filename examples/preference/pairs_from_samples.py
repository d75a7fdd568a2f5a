"""Makes pairs of the samples of an evaluation: the best answer to each prompt is better than the worst.

    skyrl eval MODEL examples/quickstart/grpo.toml generator.eval_n_samples_per_prompt=8 --to runs/round-1/samples
    python examples/preference/pairs_from_samples.py runs/round-1/samples/samples/sort.jsonl runs/round-1/pairs.jsonl

A prompt whose answers all have the same reward makes no pair.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main(samples: Path, pairs: Path, end: str) -> None:
    """Writes a row of pairs for each prompt whose rewards differ. `end` is cut off every answer."""
    answers: dict[str, list[dict[str, Any]]] = {}
    with samples.open(encoding="utf-8") as file:
        for line in file:
            sample = json.loads(line)
            answers.setdefault(sample["prompt_id"], []).append(sample)
    rows = []
    for own in answers.values():
        best, worst = max(own, key=lambda sample: sample["reward"]), min(own, key=lambda sample: sample["reward"])
        if best["reward"] != worst["reward"]:
            texts = {
                name: str(sample["response"]).removesuffix(end)
                for name, sample in (("chosen", best), ("rejected", worst))
            }
            rows.append({"prompt": best["prompt"], **texts})
    pairs.parent.mkdir(parents=True, exist_ok=True)
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} pairs of {len(answers)} prompts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes pairs of the samples of an evaluation.")
    parser.add_argument("samples", type=Path, help="file of samples: samples/SOURCE.jsonl of an evaluation")
    parser.add_argument("pairs", type=Path, help="file to write")
    parser.add_argument("--end", default="<|end|>", help="text that ends every answer")
    arguments = parser.parse_args()
    main(arguments.samples, arguments.pairs, arguments.end)
