"""What old samples cost: the quick start trained asynchronously, with and without the decoupled loss.

    python examples/quickstart/prepare.py
    python benchmarks/staleness.py [--steps 60] [--staleness 0 1 2 4 8] [--seed 42]

Prints one JSON line for each run: evaluation before and after, the mean reward of the last ten steps, and how many
groups were how many versions old when they were trained on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

TOML = "examples/quickstart/grpo.toml"


def main() -> None:
    """One run after the other."""
    parser = argparse.ArgumentParser(description="Train the quick start on samples of several ages.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--losses", nargs="+", default=["decoupled", "regular"])
    parser.add_argument("--seed", type=int, default=42)
    asked = parser.parse_args()
    for staleness in asked.staleness:
        for loss in asked.losses if staleness else asked.losses[:1]:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(run(Path(folder), staleness, loss, asked.steps, asked.seed)), flush=True)


def run(folder: Path, staleness: int, loss: str, steps: int, seed: int) -> dict[str, Any]:
    """One training, and what its metrics say."""
    changes = {
        "trainer.fully_async.enabled": "true",
        "trainer.fully_async.max_staleness_steps": staleness,
        "trainer.algorithm.policy_loss_type": loss,
        "trainer.max_training_steps": steps,
        "trainer.seed": seed,
        "trainer.ckpt_interval": -1,
        **{f"trainer.{name}_path": folder / name for name in ("run", "ckpt", "export")},
    }
    words = [f"{path}={value}" for path, value in changes.items()]
    command = [sys.executable, "-m", "skyrl.cli", "run", TOML, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    scores = [record["eval/all/avg_score"] for record in records if "eval/all/avg_score" in record]
    trained = records[1:]
    ages: Counter[int] = Counter()
    for record in trained:
        ages.update({int(name.rpartition("_")[2]): int(count) for name, count in _ages(record)})
    return {
        "benchmark": "staleness",
        "max_staleness_steps": staleness,
        "loss": loss,
        "steps": len(trained),
        "evaluation": [scores[0], scores[-1]],
        "last_rewards": round(fmean(record["reward/avg_raw_reward"] for record in trained[-10:]), 3),
        "rewards": [round(record["reward/avg_raw_reward"], 3) for record in trained],
        "groups_by_age": dict(sorted(ages.items())),
    }


def _ages(record: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, count) for name, count in record.items() if name.startswith("async/groups_of_age_")]


if __name__ == "__main__":
    main()
