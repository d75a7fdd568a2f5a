"""What old samples cost: the quick start trained asynchronously, with and without the decoupled loss.

    python examples/quickstart/prepare.py
    python benchmarks/staleness.py [--steps 60] [--staleness 0 1 2 4 8] [--seed 42] >> lines.jsonl
    python benchmarks/staleness.py --draw lines.jsonl docs/staleness.svg

Prints one JSON line for each run: evaluation before and after, the mean reward of the last ten steps, and how many
groups were how many versions old when they were trained on. The second command makes a picture of such lines.
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
_COLOURS = ("#3a86c8", "#2a9d6f", "#c98a1b", "#c8553d", "#8a5cc2")


def main() -> None:
    """One run after the other."""
    parser = argparse.ArgumentParser(description="Train the quick start on samples of several ages.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--losses", nargs="+", default=["decoupled", "regular"])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("LINES", "PICTURE"), help="of runs that are over")
    args = parser.parse_args()
    if args.draw:
        lines, picture = args.draw
        draw([json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()], picture)
        return
    for staleness in args.staleness:
        for loss in args.losses if staleness else args.losses[:1]:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(run(Path(folder), staleness, loss, args.steps, args.seed)), flush=True)


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


def draw(runs: list[dict[str, Any]], picture: Path) -> None:
    """Rewards of each step under either loss, and the ages of the groups; in greys that any background shows."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    grey: Any = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#808080"
    )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "staleness", "font.size": 9, **grey}):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        decoupled, regular, ages = figure.subplots(1, 3)
        for axes, loss in ((decoupled, "decoupled"), (regular, "regular")):
            axes.set(title=f"{loss} loss: reward, mean of 5 steps", xlabel="step", ylim=(0, 1))
        ages.set(title="groups by age in versions", xlabel="max_staleness_steps")
        bounds = sorted({run["max_staleness_steps"] for run in runs})
        for run in sorted(runs, key=lambda run: run["max_staleness_steps"]):
            bound, rewards = run["max_staleness_steps"], run["rewards"]
            means = [fmean(rewards[max(0, step - 4) : step + 1]) for step in range(len(rewards))]
            panels = [decoupled, regular] if bound == 0 else [decoupled if run["loss"] == "decoupled" else regular]
            for axes in panels:
                axes.plot(range(1, len(means) + 1), means, color=_COLOURS[bounds.index(bound)], label=str(bound))
            if run["loss"] == "decoupled":
                _stack(ages, bounds.index(bound), run["groups_by_age"])
        ages.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
        lines, names = decoupled.get_legend_handles_labels()
        where: Any = {"loc": "outside lower center", "ncols": len(lines), "frameon": False}
        figure.legend(lines, names, title="max_staleness_steps", **where)
        for axes in (decoupled, regular, ages):
            axes.set_facecolor("none")
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(picture, transparent=True, metadata={"Date": None})


def _stack(axes: Any, index: int, groups_by_age: dict[str, int]) -> None:
    """One bar; the largest part says how old its groups are."""
    total, bottom = sum(groups_by_age.values()), 0.0
    for age, count in sorted((int(age), count) for age, count in groups_by_age.items()):
        share = count / total
        axes.bar(index, share, bottom=bottom, width=0.7, color=_COLOURS[index], edgecolor="#808080", linewidth=0.5)
        if share > 0.1:
            axes.text(index, bottom + share / 2, f"{age}\n{share:.0%}", ha="center", va="center", color="white")
        bottom += share


def _ages(record: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, count) for name, count in record.items() if name.startswith("async/groups_of_age_")]


if __name__ == "__main__":
    main()
