"""Summary of a finished run for the terminal: locations of its files, and its improvement."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from skyrl.runs.run_folder import RunFolder
from skyrl.runs.run_tree import AnyRun


def summary(run: AnyRun, folder: RunFolder) -> Iterator[str]:
    """Lines for the terminal; the last one compares the first evaluation with the last."""
    paths = (
        ("configuration", folder.path / "config.json"),
        ("metrics", folder.path / "metrics.jsonl"),
        ("samples", folder.path / "trajectories.jsonl"),
        ("reward curve", folder.path / "reward_curve.png"),
        ("trained model", folder.model),
        ("adapter", folder.adapter),
        ("recording", folder.recording().folder),
        ("checkpoints", Path(run.trainer.folder("ckpt_path")).expanduser()),
        ("evaluations", Path(run.trainer.folder("export_path")).expanduser() / "dumped_evals"),
    )
    for name, path in paths:
        if path.exists() and (name != "checkpoints" or any(path.glob("global_step_*"))):
            yield f"  {name:<14} {relative_to_cwd(path)}"
    for label, command in next_commands(folder.path):
        yield f"  {label:<14} {command}"
    yield from _scores(folder)
    yield from _losses(folder)


def next_commands(folder: Path) -> Iterator[tuple[str, str]]:
    """What one does with a run next, and the command for it."""
    name = shlex.quote(relative_to_cwd(folder))
    if (folder / "trajectories.jsonl").exists():
        yield "look at it", f"skyrl view {name}"
    yield "compare it", f"skyrl report {name} OTHER_RUN..."


def relative_to_cwd(path: Path) -> str:
    """The path relative to the working directory, if it is inside."""
    absolute, cwd = path.absolute(), Path.cwd()
    return str(absolute.relative_to(cwd) if absolute.is_relative_to(cwd) else absolute)


def _losses(folder: RunFolder) -> Iterator[str]:
    for name in ("eval/all/loss", "train/loss"):
        losses = [(record["step"], record[name]) for record in folder.metrics.read() if name in record]
        if losses:
            (first, before), (last, after) = losses[0], losses[-1]
            start = f"{before:.3f} at step {first}, " if first < last else ""
            yield f"{name} {start}{after:.3f} at step {last}"


def _scores(folder: RunFolder) -> Iterator[str]:
    name = "eval/all/avg_score"
    records = [record for record in folder.metrics.read() if name in record]
    if not records:
        return
    before, after = records[0], records[-1]
    metric = "accuracy" if all(record[name] == record["eval/all/accuracy"] for record in records) else "score"
    if before["step"] == 0 and after["step"] > 0:
        yield f"{metric} before {before[name]:.2f} after {after[name]:.2f}"
    else:
        yield f"{metric} {after[name]:.2f} at step {after['step']}"
