"""A run on Ray that goes on with another number of learner ranks: the same samples, and losses to 1e-6."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.nano_run import metrics, train

pytestmark = pytest.mark.long

ON_RAY: dict[str, Any] = {
    "trainer__placement__executor": "ray",
    "trainer__placement__colocate_all": False,
    "trainer__deterministic": True,
    "trainer__micro_train_batch_size_per_gpu": 1,
    "trainer__micro_forward_batch_size_per_gpu": 1,
    "trainer__max_training_steps": 4,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}
RANKS = "trainer__placement__policy_num_gpus_per_node"


def samples(out: Path) -> list[tuple[int, str, list[int]]]:
    """Step, prompt and answer of everything that was trained on, in order."""
    lines = (out / "run" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["step"], row["prompt_id"], row["response_ids"]) for row in map(json.loads, lines)]


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2", 1), ("fsdp2", 4), ("deepspeed", 1)])
def test_a_run_of_two_ranks_goes_on_with_others(nano: Path, tmp_path: Path, strategy: str, ranks: int) -> None:
    changes = {**ON_RAY, "trainer__strategy": strategy}
    train(nano, tmp_path / "whole", **changes, **{RANKS: 2})
    train(nano, tmp_path / "resumed", **changes | {"trainer__max_training_steps": 2}, **{RANKS: 2})
    train(nano, tmp_path / "resumed", **changes, **{RANKS: ranks})
    manifest = json.loads((tmp_path / "resumed" / "checkpoints" / "global_step_4" / "manifest.json").read_text())
    assert manifest["world_size"] == {"policy": ranks}
    assert samples(tmp_path / "resumed") == samples(tmp_path / "whole")
    for one, two in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "resumed"), strict=True):
        if one["step"]:
            assert two["policy/final_loss"] == pytest.approx(one["policy/final_loss"], rel=1e-6, abs=1e-6)
