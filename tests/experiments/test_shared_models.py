"""Runs on Ray whose ranks share rows or matrices: they learn, their engines get their weights, others go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import compose
from skyrl.experiments.ppo import BasePPOExp
from tests.experiments.test_other_ranks import ON_RAY, RANKS, samples
from tests.nano_run import metrics, train

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SIZES = ("sequence", "context", "tensor")


def size_of(name: str) -> str:
    """The field of `train` for one of the sizes."""
    return f"trainer__policy__{name}_parallel_size"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data of the quick start."""
    out = tmp_path_factory.mktemp("quickstart") / "base"
    subprocess.run([sys.executable, str(QUICKSTART / "prepare.py"), "--out", str(out)], check=True, cwd=ROOT)
    return out


def on_two_ranks(base: Path, folder: Path) -> dict[str, Any]:
    """Changes to the quick start: its policy on two ranks of a Ray cluster, and its run below `folder`."""
    return {
        "data.train_data": [str(base / "train.parquet")],
        "data.val_data": [str(base / "validation.parquet")],
        "environment.env_class": f"{QUICKSTART / 'reward.py'}:sorted_exactly",
        "trainer.policy.model.path": str(base / "model"),
        "trainer.run_path": str(folder / "run"),
        "trainer.placement.executor": "ray",
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.placement.heartbeat_timeout_seconds": 600,
    }


@pytest.mark.parametrize("name", SIZES)
def test_the_quick_start_learns_on_two_ranks_that_share_its_model(name: str, base: Path, tmp_path: Path) -> None:
    values = on_two_ranks(base, tmp_path) | {f"trainer.policy.{name}_parallel_size": 2}
    BasePPOExp(compose([str(QUICKSTART / "grpo.toml")], values).config).run()
    scores = [row["eval/all/avg_score"] for row in metrics(tmp_path) if "eval/all/avg_score" in row]
    assert scores[-1] >= 0.8


@pytest.mark.parametrize(
    "sizes", [*((size,) for size in SIZES), ("context", "tensor"), ("sequence", "tensor")], ids=" and ".join
)
def test_engines_get_the_weights_of_ranks_that_share_a_model(
    sizes: tuple[str, ...], nano: Path, tmp_path: Path
) -> None:
    shared = {size_of(name): 2 for name in sizes}
    train(nano, tmp_path, **ON_RAY | {"trainer__max_training_steps": 2}, **shared, **{RANKS: 2 ** len(sizes)})
    parity = [row["weight_sync/parity_max"] for row in metrics(tmp_path) if "weight_sync/parity_max" in row]
    assert parity and max(parity) < 1e-4


@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "fsdp2"},
        {"strategy": "deepspeed"},
        {"policy.sequence_parallel_size": 2},
        {"policy.context_parallel_size": 2},
        {"policy.tensor_parallel_size": 2},
    ],
    ids=lambda layout: " ".join(f"{name}={value}" for name, value in layout.items()),
)
def test_engines_of_vllm_get_the_weights_of_every_layout(layout: dict[str, Any], base: Path, tmp_path: Path) -> None:
    values = on_two_ranks(base, tmp_path) | {f"trainer.{name}": value for name, value in layout.items()}
    engine = {"backend": "vllm", "model_dtype": "float32", "max_num_seqs": 64}
    values |= {f"generator.inference_engine.{name}": value for name, value in engine.items()}
    values |= {"trainer.max_training_steps": 2, "trainer.eval_interval": -1}
    BasePPOExp(compose([str(QUICKSTART / "grpo.toml")], values).config).run()
    parity = [row["weight_sync/parity_max"] for row in metrics(tmp_path) if "weight_sync/parity_max" in row]
    assert len(parity) >= 2
    assert max(parity) < 1e-4


@pytest.mark.parametrize("name", SIZES)
def test_a_run_of_ranks_that_share_a_model_goes_on_as_one(name: str, nano: Path, tmp_path: Path) -> None:
    two: dict[str, Any] = {**ON_RAY, RANKS: 2, size_of(name): 2}
    train(nano, tmp_path / "whole", **two)
    train(nano, tmp_path / "resumed", **two | {"trainer__max_training_steps": 2})
    train(nano, tmp_path / "resumed", **ON_RAY | {RANKS: 1, "trainer__resume_with_changes": True})
    manifest = json.loads((tmp_path / "resumed" / "checkpoints" / "global_step_4" / "manifest.json").read_text())
    assert manifest["world_size"] == {"policy": 1}
    assert samples(tmp_path / "resumed") == samples(tmp_path / "whole")
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "resumed"), strict=True):
        if one["step"]:
            assert other["policy/final_loss"] == pytest.approx(one["policy/final_loss"], rel=1e-6, abs=1e-6)
