"""What a curriculum is worth: easy, right and impossible tasks in equal parts, drawn in turn, by their success, or
by their difficulty.

    python examples/quickstart/prepare.py
    python -m benchmarks.curriculum [--rows 400] [--steps 150] [--seeds 0 1 2] >> lines.jsonl
    python -m benchmarks.curriculum --table lines.jsonl

The right tasks are those of the quick start. Any answer to an easy one is rewarded, and none to an impossible one, so
that groups of either carry no signal. Prints one JSON line for each run:
the share of groups whose rewards were all equal, over all steps until the evaluation on other right tasks reached 0.8,
of all groups and of those whose task had been drawn before (of a new task nothing can be known), and the number of
these steps. The last command makes a table of such lines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

TOML = "examples/quickstart/grpo.toml"
BASE = Path("runs/quickstart-base")
ENOUGH = 0.8
EVERY = 2
"""Steps between evaluations."""

POOLS = [
    {"name": "failed", "threshold": 0.02, "weight": 0.01},
    {"name": "mixed", "threshold": 0.75, "weight": 1.0},
    {"name": "almost_solved", "threshold": 0.95, "weight": 0.1},
    {"name": "solved", "threshold": 1.0, "weight": 0.01},
]
"""Prompts of which every sample failed, many did, few did, none did, in their last groups."""

BY_SUCCESS = {"pools": json.dumps(POOLS), "pool_memory": 0.5, "unseen_weight": 0.1}
"""Settings of `data.curriculum` for pools: prompts that gave a signal once are worth more than new ones."""

BY_DIFFICULTY = {"target.initial": 4, "target.min": 3, "target.max": 6.5, "target.step_size": 1}
"""Those for a target difficulty, which is the number of letters; easy tasks have 0, and impossible ones 20."""

SETTINGS: dict[str, dict[str, Any]] = {"pools": BY_SUCCESS, "target_difficulty": BY_DIFFICULTY}


def main() -> None:
    """One run after the other, or the table."""
    parser = argparse.ArgumentParser(description="Train on tasks of which a third is worth it.")
    parser.add_argument("--rows", type=int, default=400, help="of each kind")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samplers", nargs="+", default=["permutation", *SETTINGS])
    parser.add_argument("--table", type=Path, metavar="LINES", help="of runs that are over")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()]))
        return
    for seed in args.seeds:
        for sampler in args.samplers:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(run(Path(folder), sampler, args.rows, args.steps, seed)), flush=True)


def sorted_or_not(completion: str, ground_truth: str, kind: str, **others: Any) -> float:
    """The reward of an answer to a task of this kind."""
    if kind == "easy":
        return 1.0
    return float(kind == "right" and completion.strip() == ground_truth)


def write(folder: Path, rows: int) -> tuple[Path, Path]:
    """Files of tasks to train on, `rows` of each kind, and of right ones to evaluate on."""
    import pyarrow.parquet as pq

    train, others = (pq.read_table(BASE / f"{name}.parquet").to_pylist() for name in ("train", "validation"))
    kinds = [kind for kind in ("easy", "right", "impossible") for _ in range(rows)]
    files = {"train": zip(train, kinds, strict=False), "validation": ((row, "right") for row in others[:128])}
    for name, lines in files.items():
        rows_of_kind = ({**row, "kind": kind, "difficulty": difficulty(row, kind)} for row, kind in lines)
        text = "".join(f"{json.dumps(row)}\n" for row in rows_of_kind)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder / "train.jsonl", folder / "validation.jsonl"


def difficulty(row: dict[str, Any], kind: str) -> int:
    """What is known about a task before training: how many letters are to be sorted, or that it is easy or hopeless."""
    return {"easy": 0, "impossible": 20}.get(kind, len(row["reward_spec"]["ground_truth"]))


def run(folder: Path, sampler: str, rows: int, steps: int, seed: int) -> dict[str, Any]:
    """One training, and what its metrics say."""
    train, validation = write(folder, rows)
    changes = {
        "data.train_data": json.dumps([str(train)]),
        "data.val_data": json.dumps([str(validation)]),
        "data.curriculum.sampler": sampler,
        **{f"data.curriculum.{name}": value for name, value in SETTINGS.get(sampler, {}).items()},
        "environment.env_class": "benchmarks/curriculum.py:sorted_or_not",
        "trainer.epochs": 1000,
        "trainer.max_training_steps": steps,
        "trainer.eval_interval": EVERY,
        "trainer.seed": seed,
        "trainer.ckpt_interval": -1,
        "trainer.alarms": json.dumps(
            [{"metric": "eval/all/avg_score", "threshold": ENOUGH, "window": 1, "action": "stop"}]
        ),
        **{f"trainer.{name}_path": folder / name for name in ("run", "ckpt", "export")},
    }
    words = [f"{path}={value}" for path, value in changes.items()]
    command = [sys.executable, "-m", "skyrl.cli", "run", TOML, *words]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr[-2000:])
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    reached = [record["trainer/global_step"] for record in records[1:] if record.get("eval/all/avg_score", 0) >= ENOUGH]
    return {
        "benchmark": "curriculum",
        "sampler": sampler,
        "seed": seed,
        "steps_to_0.8": int(reached[0]) if reached else None,
        **without_signal(folder / "run"),
        "scores": [round(record["eval/all/avg_score"], 3) for record in records if "eval/all/avg_score" in record],
    }


def without_signal(run: Path) -> dict[str, float | None]:
    """Share of groups whose rewards are all equal: of all, and of those whose task was drawn in an earlier step, if
    there is one.
    """
    rewards: dict[tuple[int, str], list[float]] = {}
    for line in (run / "trajectories.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        rewards.setdefault((sample["step"], sample["prompt_id"]), []).append(sample["reward"])
    first: dict[str, int] = {}
    for step, task in sorted(rewards):
        first.setdefault(task, step)
    flat = {drawn: len(set(own)) == 1 for drawn, own in rewards.items()}
    of_seen = [is_flat for (step, task), is_flat in flat.items() if first[task] < step]
    return {
        "groups_without_signal": round(fmean(flat.values()), 3),
        "of_seen_tasks": round(fmean(of_seen), 3) if of_seen else None,
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs as Markdown: a line for each sampler, with a value for each seed."""
    titles = ("sampler", "groups without signal, by seed", "of tasks drawn before", "step at 0.8")
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for sampler in dict.fromkeys(run["sampler"] for run in runs):
        own = sorted((run for run in runs if run["sampler"] == sampler), key=lambda run: run["seed"])
        shares = [
            ", ".join("none" if run[name] is None else f"{run[name]:.2f}" for run in own)
            for name in ("groups_without_signal", "of_seen_tasks")
        ]
        steps = ", ".join(str(run["steps_to_0.8"] or "never") for run in own)
        rows.append(f"| {' | '.join((sampler, *shares, steps))} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
