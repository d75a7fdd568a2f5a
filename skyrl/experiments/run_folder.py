"""The folder of a run: everything that a person wants to find afterwards.

    config.json           the resolved configuration, and its fingerprint
    metrics.jsonl         one line for each step
    trajectories.jsonl    sampled answers with their rewards
    reward_curve.png
    sandbox.json          the sandbox tier in force, where something ran in sandboxes
    model/                the trained model in Hugging Face format
    logs/                 of processes other than the command's own: one file for each

A record of a step is written before the step's checkpoint, so that a run that resumes can cut both files back to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from skyrl.tracking.curve import draw_reward_curve
from skyrl.tracking.jsonlines import JsonLines


class RunFolder:
    """Names of what lies in a run's folder, and the operations on all of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.trajectories = JsonLines(path / "trajectories.jsonl")
        self.model = path / "model"

    def forget_after(self, step: int) -> None:
        """Drop what was recorded of later steps, which will happen again."""
        self.metrics.forget_after(step)
        self.trajectories.forget_after(step)

    def record_sandbox(self, in_force: Mapping[str, object]) -> None:
        """Keep what kept the policy's programs apart."""
        (self.path / "sandbox.json").write_text(json.dumps(in_force, indent=2) + "\n", encoding="utf-8")

    def draw_curve(self, title: str) -> None:
        """Draw `reward_curve.png` from the metrics."""
        draw_reward_curve(self.metrics.read(), self.path / "reward_curve.png", title)
