"""Steps that a student takes to its teacher's accuracy, taught by the teacher alone and by rewards alone.

    python examples/quickstart/prepare.py
    skyrl run examples/quickstart/grpo.toml          # the teacher: the quick start's trained model
    python -m benchmarks.distillation [--seeds 42 43 44] [--steps 60] [--sides teacher rewards] >> lines.jsonl
    python -m benchmarks.distillation --table lines.jsonl

Both sides are the quick start's student, prompts, samples per step and evaluation. Rewards have the quick start's own
settings, and `rewards_as_taught` the updates per batch of the other side. Prints one JSON line for each run:
its scores by step, and the first step at which an evaluation reached 0.95 of the teacher's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RL, TAUGHT = "examples/quickstart/grpo.toml", "examples/distillation/distill.toml"
TEACHER = Path("runs/quickstart")
SHARE = 0.95
"""Share of the teacher's accuracy that a student has to reach."""

AS_TAUGHT = {"trainer.policy_mini_batch_size": 4, "trainer.policy.optimizer_config.num_warmup_steps": 10}
SIDES: Mapping[str, tuple[tuple[str, ...], Mapping[str, object]]] = {
    "teacher": ((RL, TAUGHT), {}),
    "rewards": ((RL,), {}),
    "rewards_as_taught": ((RL,), AS_TAUGHT),
}
"""Side -> its files, and what it sets besides."""


def main() -> None:
    """One run after the other, or the table."""
    parser = argparse.ArgumentParser(description="Compare learning from a teacher with learning from rewards.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=3, help="steps between evaluations")
    parser.add_argument("--sides", nargs="+", default=["teacher", "rewards"], choices=list(SIDES))
    parser.add_argument("--teacher", type=Path, default=TEACHER, help="folder of the run that trained it (%(default)s)")
    parser.add_argument("--set", nargs="*", default=[], metavar="path=value", help="for every run")
    parser.add_argument("--table", type=Path, metavar="LINES", help="of runs that are over")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()]))
        return
    threshold = SHARE * scores_of(args.teacher)[-1][1]
    for seed in args.seeds:
        for side in args.sides:
            with tempfile.TemporaryDirectory() as folder:
                line = run(Path(folder), side, seed, args, threshold)
            print(json.dumps(line), flush=True)


def run(folder: Path, side: str, seed: int, args: argparse.Namespace, threshold: float) -> dict[str, Any]:
    """One training, which ends when an evaluation has reached `threshold`, and what its metrics say."""
    files, own = SIDES[side]
    changes: dict[str, object] = {
        **own,
        "trainer.max_training_steps": args.steps,
        "trainer.eval_interval": args.every,
        "trainer.seed": seed,
        "trainer.ckpt_interval": -1,
        "trainer.alarms": json.dumps(
            [{"metric": "eval/all/avg_score", "threshold": threshold, "window": 1, "action": "stop"}]
        ),
        **{f"trainer.{name}_path": folder / name for name in ("run", "ckpt", "export")},
    }
    if side == "teacher":
        changes["trainer.teacher.model.path"] = args.teacher / "model"
    words = [*(f"{path}={value}" for path, value in changes.items()), *args.set]
    process = subprocess.run(
        [sys.executable, "-m", "skyrl.cli", "run", *files, *words], check=False, capture_output=True, text=True
    )
    if process.returncode:
        raise SystemExit(process.stderr[-2000:])
    scores = scores_of(folder / "run")
    return {
        "benchmark": "distillation",
        "side": side,
        "seed": seed,
        "set": args.set,
        "wanted": round(threshold, 3),
        "step": next((step for step, score in scores if step and score >= threshold), None),
        "scores": [(step, round(score, 3)) for step, score in scores],
    }


def scores_of(folder: Path) -> list[tuple[int, float]]:
    """Step and accuracy of each evaluation of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        (int(record["step"]), float(record["eval/all/avg_score"])) for record in lines if "eval/all/avg_score" in record
    ]


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs as Markdown: a line for each side, with a value for each seed."""
    seeds = sorted({run["seed"] for run in runs})
    rows = [f"| from | {' | '.join(f'seed {seed}' for seed in seeds)} |", "|---" * (len(seeds) + 1) + "|"]
    for side in dict.fromkeys(run["side"] for run in runs):
        own = {run["seed"]: run["step"] or "never" for run in runs if run["side"] == side}
        rows.append(f"| {side} | {' | '.join(str(own.get(seed, '')) for seed in seeds)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
