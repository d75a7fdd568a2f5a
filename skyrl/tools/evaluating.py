"""Evaluation of a model that is not trained: scores, confidence intervals and samples, in a folder.

results.json                what was evaluated, and every score with its 95 % interval
samples/<source>.jsonl      every sample with its reward
config.json                 the configuration
"""

from __future__ import annotations

import json
from typing import Any

from skyrl.errors import UserError
from skyrl.experiments.standalone import StandaloneSampling
from skyrl.tools.sampling_target import Target
from skyrl.training.evaluation import intervals, with_all
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import required


def evaluate(target: Target, sampling: StandaloneSampling) -> dict[str, Any]:
    """Sample every evaluation prompt and score the answers. Returns the content of `results.json`.

    Metrics and their names are those of evaluation during training. Raises `DataError`, `TaskError`, `RewardError`,
    and any other error that evaluation in a run raises.
    """
    sandbox = sampling.check_inputs()
    evaluation = sampling.get_evaluation()
    if evaluation is None:
        raise UserError("data.val_data is empty: set it to the prompts to evaluate on")
    groups: tuple[TrajectoryGroup, ...] = sampling.sample(lambda: evaluation.sample(target.step))
    folder, metrics = sampling.folder.path, evaluation.measure(groups)
    evaluation.dump(folder / "samples", target.step, groups, metrics)
    sampling_params = required(sampling.cfg.generator.eval_sampling_params, "generator.eval_sampling_params")
    results = {
        "target": target.name,
        "step": target.step,
        "prompts": {source: len(own) for source, own in with_all(groups).items()},
        "samples_per_prompt": sampling.cfg.generator.eval_n_samples_per_prompt,
        "temperature": 0.0 if sampling_params.greedy else sampling_params.temperature,
        "seed": sampling.cfg.trainer.seed,
        "engine": sampling.cfg.generator.inference_engine.backend,
        "confidence": 0.95,
        "metrics": metrics,
        "intervals": {
            f"eval/{source}/{name}": bounds
            for source, own in with_all(groups).items()
            for name, bounds in intervals(own, sampling.cfg.generator.eval_n_samples_per_prompt).items()
        },
    }
    if sandbox is not None:
        sampling.folder.record_sandbox(sandbox)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def table(results: dict[str, Any]) -> list[str]:
    """Lines for a terminal: a row for each data source and score, with its interval."""
    rows = [("source", "score", "value", "95 % interval")]
    for name, value in results["metrics"].items():
        source, _, score = name.removeprefix("eval/").rpartition("/")
        if score.endswith("_stderr") or source not in results["prompts"]:
            continue
        bounds = results["intervals"].get(name)
        rows.append((source, score, f"{value:.4f}", f"{bounds[0]:.4f} to {bounds[1]:.4f}" if bounds else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def failures(results: dict[str, Any]) -> list[str]:
    """Lines on attempts and prompts that have no score."""
    return [f"{name}: {value:g}" for name, value in results["metrics"].items() if name.count("/") == 1]
