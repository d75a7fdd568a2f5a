"""Running the nano model of `conftest.py`: its configuration, and what a finished run left behind."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from skyrl.config import SkyRLTrainConfig, compose
from skyrl.experiments.ppo import BasePPOExp
from skyrl.tracking.metric_table import depends_on_machine, unknown


def overrides(nano: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Dotted paths and values of a run of six steps of four prompts, everything below `out`; `__` stands for a dot."""
    values: dict[str, Any] = {
        "data.train_data": [str(nano / "train.jsonl")],
        "data.val_data": [str(nano / "validation.jsonl")],
        "trainer.policy.model.path": str(nano / "model"),
        "trainer.policy.optimizer_config.lr": 1e-2,
        "trainer.run_path": str(out / "run"),
        "trainer.ckpt_path": str(out / "checkpoints"),
        "trainer.export_path": str(out / "exports"),
        "trainer.logger": "console",
        "trainer.device": "cpu",
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.micro_forward_batch_size_per_gpu": 8,
        "trainer.eval_interval": 3,
        "trainer.ckpt_interval": 2,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.max_prompt_length": 16,
        "generator.n_samples_per_prompt": 3,
        "generator.sampling_params.max_generate_length": 5,
        "generator.inference_engine.backend": "torch",
        "environment.env_class": f"{nano / 'reward.py'}:in_ascii",
    }
    return values | {name.replace("__", "."): value for name, value in changes.items()}


def as_words(values: Mapping[str, Any]) -> list[str]:
    """The same as arguments of the command."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]


def config(nano: Path, out: Path, **changes: Any) -> SkyRLTrainConfig:
    """The same, resolved and checked."""
    return compose([], overrides(nano, out, **changes)).config


def train(nano: Path, out: Path, **changes: Any) -> BasePPOExp:
    """The same, trained to the end in this process."""
    experiment = BasePPOExp(config(nano, out, **changes))
    with without_curve():
        experiment.run()
    return experiment


def without_curve() -> AbstractContextManager[object]:
    """Runs in this process leave an empty file as their reward curve, which takes a sixth of such a run to draw."""
    return mock.patch("skyrl.runs.run_folder.draw_reward_curve", lambda records, path, title: path.touch())


def metrics(out: Path, own: Collection[str] = ()) -> list[dict[str, Any]]:
    """`metrics.jsonl` without what depends on the machine. `own` are metrics of a loss that is not skyrl's."""
    return [
        {name: value for name, value in record.items() if not depends_on_machine(name)}
        for record in all_metrics(out, own)
    ]


def all_metrics(out: Path, own: Collection[str] = ()) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`. Every name in it has to be in the table of metrics."""
    lines = (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    missing = unknown({name for record in records for name in record} - set(own))
    assert missing == [], f"not in skyrl/tracking/metric_table.py: {missing}"
    return records
