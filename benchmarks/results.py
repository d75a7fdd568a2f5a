"""The recipes of docs/results.md: runs one and stores what came out, or draws what is stored.

    python examples/smollm2/prepare.py
    python -m benchmarks.results run grpo [--seed 2]
    python -m benchmarks.results draw                   docs/results/*.svg, from the stored results
    python -m benchmarks.results                        the stored results, one JSON line each

A result is one file in docs/results/: the evaluations and rewards of a run, its alarms, its time, and the commit. A
recipe with `answers` also samples from the model before and after training, under the same settings. `make pages`
writes the tables of the page from these files.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl.config import compose
from skyrl.training.evaluation import share_interval

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "results"
RECIPES_FOLDER = "examples/smollm2"


@frozen
class Recipe:
    """A run of one configuration file."""

    title: str
    task: str
    method: str
    file: str
    before: Sequence[str] = ()
    """Scripts that write its data."""

    score: str = "eval/all/avg_score"
    """The metric of evaluation that the table shows."""

    answers: Sequence[str] = ()
    """File and changes with which `skyrl eval` scores sampled answers, before training and after it."""

    measure: str = ""
    """What a score of the sampled answers is."""


SUMS, WORKED = "sums of two digits", "sums of two-digit numbers, worked out"
RECIPES: Mapping[str, Recipe] = {
    "grpo": Recipe("GRPO", SUMS, "GRPO, all weights", "grpo.toml"),
    "lora": Recipe("GRPO with LoRA", SUMS, "GRPO, an adapter of rank 16", "lora/grpo.toml"),
    "vllm": Recipe("vLLM on Ray", SUMS, "GRPO; vLLM samples, Ray runs both", "vllm/grpo.toml"),
    "async": Recipe("Asynchronous", SUMS, "GRPO, samples up to 2 versions old", "async/grpo.toml"),
    "sft": Recipe("SFT", WORKED, "SFT on 144 made chats", "sft/sft.toml", ("sft/data.py",), "train/loss"),
    "sft-grpo": Recipe("GRPO after SFT", WORKED, "GRPO from the model of SFT", "sft/grpo.toml"),
    "agent": Recipe(
        "An agent with a calculator", "products and differences", "GRPO over two turns", "agent/grpo.toml",
        ("agent/data.py",),
    ),
    "reward-model": Recipe(
        "Reward model", "right and wrong answers", "reward model, pairs of its own answers",
        "reward_model/reward_model.toml", ("reward_model/data.py",), "eval/all/loss",
    ),
    "reward-grpo": Recipe("GRPO on its scores", SUMS, "GRPO, rewarded by the model", "reward_model/grpo.toml"),
    "distill": Recipe("Distillation", SUMS, "on policy, from the model of GRPO", "distillation/distill.toml"),
    "dpo-short": Recipe(
        "DPO: short answers", "short and long answers", "DPO and sft on 144 made pairs, an adapter",
        "preference/short.toml", ("preference/data.py",), "eval/all/accuracy",
        ("preference/bench.toml",), "words of an answer",
    ),
    "dpo-polite": Recipe(
        "DPO: polite answers", "polite and rude answers", "DPO and sft on 96 made pairs, an adapter",
        "preference/polite.toml", ("preference/data.py",), "eval/all/accuracy",
        ("preference/bench.toml", f"environment.env_class={RECIPES_FOLDER}/preference/reward.py:politeness"),
        "share of polite answers",
    ),
    "dpo-sums": Recipe(
        "DPO: right sums", "right and wrong sums", "DPO and sft on 192 made pairs, an adapter",
        "preference/sums.toml", ("preference/data.py",), "eval/all/accuracy",
        ("grpo.toml",), "share of right sums",
    ),
    "too-fast": Recipe("Mistake: 30 times the rate", SUMS, "GRPO, lr 3e-4", "mistakes/too_fast.toml"),
    "length": Recipe(
        "Mistake: length is paid", SUMS, "GRPO, 0.1 a word", "mistakes/length.toml", (),
    ),
}  # fmt: skip


def main() -> None:
    """Runs, draws or prints."""
    parser = argparse.ArgumentParser(description="Run a recipe and store its result, or draw what is stored.")
    does = parser.add_subparsers(dest="does")
    run_parser = does.add_parser("run", help="train, and store what came out")
    run_parser.add_argument("recipe", choices=RECIPES)
    run_parser.add_argument("--seed", type=int, default=1)
    does.add_parser("draw", help="make the pictures of docs/results.md")
    arguments = parser.parse_args()
    if arguments.does == "run":
        file = STORED / f"{arguments.recipe}-{arguments.seed}.json"
        file.write_text(json.dumps(run(arguments.recipe, arguments.seed)) + "\n", encoding="utf-8")
    elif arguments.does == "draw":
        draw(list(results()))
    else:
        for result in results():
            print(json.dumps(result))


def results() -> Iterator[dict[str, Any]]:
    """What is stored, by recipe and seed."""
    for name in RECIPES:
        for file in sorted(STORED.glob(f"{name}-[0-9]*.json")):
            yield json.loads(file.read_text(encoding="utf-8"))


def run(name: str, seed: int, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Trains, and returns what is stored of it; `changes` are further arguments of `skyrl run`."""
    recipe = RECIPES[name]
    for script in recipe.before:
        subprocess.run([sys.executable, f"{RECIPES_FOLDER}/{script}"], cwd=ROOT, check=True)
    config, folder, model = _settings(recipe, seed, changes)
    if (ROOT / folder).exists():
        raise SystemExit(f"{folder} is there already: remove it, or name another folder")
    before = _answers(recipe, model, f"{folder}-answers/before") if recipe.answers else []
    started, used = time.monotonic(), _cpu_seconds()
    command = [sys.executable, "-m", "skyrl.cli", "run", f"{RECIPES_FOLDER}/{recipe.file}", *config]
    subprocess.run(command, cwd=ROOT, check=True)
    seconds, cpu_seconds = time.monotonic() - started, _cpu_seconds() - used
    after = _answers(recipe, str(folder), f"{folder}-answers/after") if recipe.answers else []
    return {
        "recipe": name,
        "seed": seed,
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "seconds": round(seconds),
        # Ray's processes are nobody's children.
        "cpu_seconds": None if name == "vllm" else round(cpu_seconds),
        **read(ROOT / folder, recipe),
        **({"answers": {"before": before, "after": after}} if recipe.answers else {}),
    }


def _answers(recipe: Recipe, model: str, to: str) -> list[float | str]:
    """Mean score of a model's sampled answers, the bounds of its 95 % interval, and the first prompt with its answer.
    All answers are in `to`/samples.
    """
    file, *changes = recipe.answers
    command = [sys.executable, "-m", "skyrl.cli", "eval", model, f"{RECIPES_FOLDER}/{file}", *changes, "--to", to]
    subprocess.run(command, cwd=ROOT, check=True)
    result = json.loads((ROOT / to / "results.json").read_text(encoding="utf-8"))
    name = "eval/all/avg_score"
    numbers = [result["metrics"][name], *result["intervals"][name]]
    samples = sorted((ROOT / to / "samples").glob("*.jsonl"))
    first = next(row for file in samples if file.stem != "aggregated_results" for row in _lines(file))
    return [*(round(number, 4) for number in numbers), first["prompt"][-1]["content"], first["response"]]


def read(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """The series of a run folder: evaluations with the bounds of their 95 % intervals, rewards or losses, alarms."""
    records = _lines(folder / "metrics.jsonl")
    rewards = "reward/avg_raw_reward" if any("reward/avg_raw_reward" in record for record in records) else "train/loss"
    scored = [record for record in records if recipe.score in record]
    return {
        "steps": records[-1]["step"],
        "evaluations": [
            [record["step"], round(record[recipe.score], 4), *_interval(folder, record["step"])] for record in scored
        ],
        "training": [[record["step"], round(record[rewards], 4)] for record in records if rewards in record],
        "alarms": [[alarm["step"], alarm["name"]] for alarm in _lines(folder / "alarms.jsonl")],
    }


def _interval(folder: Path, step: int) -> list[float]:
    """Bounds of an evaluation's share of right answers, with a prompt's answers as one cluster; none if not stored."""
    clusters: dict[str, list[float]] = {}
    for file in (folder / "exports" / "dumped_evals" / f"global_step_{step}_evals").glob("*.jsonl"):
        for row in _lines(file):
            if "reward" in row:
                clusters.setdefault(row["prompt_id"], []).append(row["reward"])
    if not clusters or any(not 0 <= reward <= 1 for rewards in clusters.values() for reward in rewards):
        return []
    return [round(bound, 4) for bound in share_interval(list(clusters.values()))]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _settings(recipe: Recipe, seed: int, changes: Sequence[str]) -> tuple[list[str], Path, str]:
    """Arguments beside the file, and the run folder and the model that follow from them."""
    words = list(changes)
    file = str(ROOT / RECIPES_FOLDER / recipe.file)
    config: Any = compose([file], words).config
    inside = "trainer." if hasattr(config, "generator") else ""
    if seed != 1:
        run_path = f"{attrgetter(f'{inside}run_path')(config)}-seed{seed}"
        words += [f"{inside}seed={seed}", f"{inside}run_path={run_path}"]
        config = compose([file], words).config
    model = attrgetter(f"{inside}policy.model.path" if inside else "model.path")(config)
    return words, Path(attrgetter(f"{inside}run_path")(config)), model


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _commit() -> str:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def table() -> str:
    """The table of docs/results.md."""
    rows = ["| recipe | task | method | seed | before | after | steps | time | CPU time | commit |"]
    rows.append("|" + "---|" * 10)
    for result in results():
        recipe = RECIPES[result["recipe"]]
        scores = result["evaluations"] or result["training"]
        cells = [
            f"[{recipe.title}](../{RECIPES_FOLDER}/{recipe.file})",
            recipe.task,
            recipe.method,
            result["seed"],
            _score(scores[0]),
            _score(scores[-1]),
            result["steps"],
            _minutes(result["seconds"]),
            _minutes(result["cpu_seconds"]),
            result["commit"],
        ]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def answers_table() -> str:
    """The table of sampled answers in docs/results.md: scores, and the first answer, before and after training."""
    rows = ["| recipe | seed | sampled answers | before | after | a prompt | answer before | answer after |"]
    rows.append("|" + "---|" * 8)
    for result in results():
        if "answers" in result:
            recipe, before, after = RECIPES[result["recipe"]], result["answers"]["before"], result["answers"]["after"]
            scores = (f"{score:.2f} ({low:.2f} to {high:.2f})" for score, low, high, *_ in (before, after))
            answers = (before[3], *(sampled[4].removesuffix("<|im_end|>") for sampled in (before, after)))
            texts = (" ".join(text.split()).replace("|", "\\|") for text in answers)
            rows.append("| " + " | ".join([recipe.title, str(result["seed"]), recipe.measure, *scores, *texts]) + " |")
    return "\n".join(rows)


def _score(point: Sequence[float]) -> str:
    bounds = f" ({point[2]:.2f} to {point[3]:.2f})" if len(point) == 4 else ""
    return f"{point[1]:.2f}{bounds}"


def _minutes(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


def draw(stored: Sequence[Mapping[str, Any]]) -> None:
    """One panel for each recipe: evaluations with their intervals, and the rewards or losses of training."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    grey: Any = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#808080"
    )
    names = list(dict.fromkeys(result["recipe"] for result in stored))
    columns = 4
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "results", "font.size": 8, **grey}):
        rows = -(-len(names) // columns)
        figure = Figure(figsize=(10.5, 2.3 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for name, panel in zip(names, panels, strict=False):
            for result, color in zip((run for run in stored if run["recipe"] == name), COLORS, strict=False):
                steps, values = zip(*result["training"], strict=True)
                panel.plot(steps, values, color=color, alpha=0.4, linewidth=1)
                if result["evaluations"]:
                    steps, values = zip(*(point[:2] for point in result["evaluations"]), strict=True)
                    panel.plot(steps, values, "o-", color=color, markersize=3, label=f"seed {result['seed']}")
                for step, _, low, high in (point for point in result["evaluations"] if len(point) == 4):
                    panel.plot([step, step], [low, high], color=color, linewidth=1)
            panel.set_title(RECIPES[name].title)
            panel.set_xlabel("step")
            panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            panel.set_facecolor("none")
            panel.spines[["top", "right"]].set_visible(False)
            if all(0 <= value <= 1 for run in stored if run["recipe"] == name for _, value in run["training"]):
                panel.set_ylim(0, 1.02)
        for panel in panels:
            panel.set_visible(False)
        figure.savefig(STORED / "curves.svg", transparent=True, metadata={"Date": None})


COLORS = ("#3a86c8", "#2a9d6f", "#c98a1b", "#c8553d", "#8a5cc2")


if __name__ == "__main__":
    main()
