"""What sampling while training gains when environments are slow, and what the simulator says of it.

    python examples/quickstart/prepare.py
    python benchmarks/asynchrony.py [--steps 50] [--staleness 4]

The quick start on Ray, with one process for the learner and one for the engine, and an environment that takes 50 to
500 ms (heavy-tailed, the same for the same answer). Prints one JSON line: seconds of all steps but the first, in turns
and asynchronously, their ratio, and the simulator's prediction of both from what the run in turns measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOML = "examples/quickstart/grpo.toml"
SLOW = """
import time
from random import Random

from examples.quickstart.reward import sorted_exactly

def slowly(completion, **row):
    time.sleep(min(0.5, 0.05 * Random(completion + str(row.get("prompt"))).paretovariate(1.2)))
    return sorted_exactly(completion, **row)
"""


def main() -> None:
    """In turns, then asynchronously."""
    parser = argparse.ArgumentParser(description="Train with slow environments in turns and asynchronously.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--staleness", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "slow.py").write_text(SLOW, encoding="utf-8")
        ahead = {"trainer.fully_async.enabled": "true", "trainer.fully_async.max_staleness_steps": args.staleness}
        in_turns = run(root / "in_turns", root / "slow.py", args.steps, {})
        at_once = run(root / "at_once", root / "slow.py", args.steps, ahead)
        measured = {"in_turns": seconds(root / "in_turns"), "asynchronous": seconds(root / "at_once")}
        predicted = {
            name: simulated(words, root / "in_turns", args.steps - 1)
            for name, words in (("in_turns", in_turns), ("asynchronous", at_once))
        }
    print(
        json.dumps(
            {
                "benchmark": "asynchrony",
                "steps": args.steps,
                "staleness": args.staleness,
                "seconds": measured,
                "ratio": round(measured["asynchronous"] / measured["in_turns"], 3),
                "simulated": predicted,
                "simulated_over_measured": {name: round(predicted[name] / measured[name], 3) for name in measured},
            }
        )
    )


def run(folder: Path, environment: Path, steps: int, changes: dict[str, Any]) -> list[str]:
    """One training; its words on the command line."""
    settings = {
        "trainer.placement.executor": "ray",
        "trainer.placement.colocate_all": "false",
        "trainer.algorithm.policy_loss_type": "decoupled",
        "trainer.max_training_steps": steps,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "environment.env_class": f"{environment}:slowly",
        "environment.skyrl_gym.max_env_workers": 16,
        **{f"trainer.{name}_path": folder / name for name in ("run", "ckpt", "export")},
        **changes,
    }
    words = [f"{path}={value}" for path, value in settings.items()]
    subprocess.run([sys.executable, "-m", "skyrl.cli", "run", TOML, *words], check=True, stdout=subprocess.DEVNULL)
    return words


def seconds(folder: Path) -> float:
    """Of all steps but the first, which warms up."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["timing/step"] for record in map(json.loads, lines) if "timing/step" in record]
    return round(float(sum(steps[1:])), 2)


def simulated(words: list[str], like: Path, steps: int) -> float:
    """The simulator's seconds for as many steps, from the durations of the run in turns."""
    command = [sys.executable, "-m", "skyrl.cli", "simulate", TOML, *words, "--like", str(like / "run")]
    process = subprocess.run([*command, "--steps", str(steps), "--json"], check=True, capture_output=True, text=True)
    return round(float(json.loads(process.stdout)["result"]["seconds"]), 2)


if __name__ == "__main__":
    main()
