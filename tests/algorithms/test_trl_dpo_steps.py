"""Three steps of training are those of TRL's DPOTrainer: losses, gradients, measurements and weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.other_environments import ROOT, python_with
from tests.supervised_run import farthest, pairs, train, weights, write

pytestmark = pytest.mark.long

NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "chosen_logprob": "logps/chosen",
    "rejected_logprob": "logps/rejected",
}
"""Our names of measurements -> TRL's."""


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2]},
        {"use_weighting": True},
        {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6},
    ],
    ids=["sigmoid", "several losses", "WPO", "moving reference"],
)
def test_three_steps_are_those_of_trl(nano: Path, tmp_path: Path, variant: dict[str, Any]) -> None:
    rows = write(tmp_path / "rows.jsonl", pairs(24))
    out = tmp_path / "trl"
    out.mkdir()
    changes = {**variant, "beta": 0.5, "learning_rate": 1e-3}
    packages = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(attrs.__file__).parents[1])])}
    python = python_with("trl", ["--no-deps", "trl==1.16.0"])
    command = [python, "-m", "tests.algorithms.trl_dpo_steps", str(nano / "model"), rows, str(out), json.dumps(changes)]
    result = subprocess.run(command, env={**os.environ, **packages}, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4_000:]
    log = [record for record in json.loads((out / "log.json").read_text(encoding="utf-8")) if "loss" in record]
    settings = {"optimizer_config.lr": 1e-3, "optimizer_config.weight_decay": 0.0, "num_epochs": 1}
    metrics = train(
        nano, tmp_path, "preference", **variant, **settings, beta=0.5, train_datasets=(rows,), sampler="sequential"
    )
    records = [record for record in metrics if record["step"]]
    assert len(log) == len(records) == 3
    for expected, ours in zip(log, records, strict=True):
        for name, their_name in NAMES.items():
            assert ours[f"train/{name}"] == pytest.approx(float(expected[their_name]), rel=1e-4, abs=1e-4), name
    assert farthest(torch.load(out / "weights.pt", weights_only=True), weights(tmp_path)) < 1e-5
