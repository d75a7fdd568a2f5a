"""Every script of `benchmarks/` runs, in its shortest form, and prints a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.long_cases import long_except

ROOT = Path(__file__).parents[1]

SHORTEST: Mapping[str, str] = {
    "asynchrony": "--steps 3 --staleness 1",
    "checkpoints": "--steps 2 --rounds 1 --megabytes 1",
    "config": "1",
    "config_doors": "20",
    "data_start": "--rows 20 --ways stored mapped",
    "curriculum": "--rows 8 --steps 2 --seeds 0 --samplers pools",
    "driver": "--tokens 20 --steps 2 16",
    "endpoint": "--clients 4 --seconds 1",
    "generation": "--short --only uniform --rounds 1",
    "grpo_step": "--sides skyrl,bare 4 0",
    "layouts": "--rounds 1",
    "linear_logprobs": "",
    "many_adapters": "2 1",
    "masks": "10",
    "memory": "tiny",
    "results": "",
    "ray_step": "--steps 3 --prompts 2 --samples 2 --tokens 4",
    "parity": "--steps 3 --sets 1",
    "rollouts": "--trajectories 8 --workers 4 --milliseconds 1",
    "routing": "--engines 2",
    "routing_replay": "--layers 1 --experts 4 --prompts 1 --samples 2 --tokens 4",
    "sandboxes": "--calls 2",
    "sft": "--sides skyrl",
    "staleness": "--steps 1 --staleness 1 --losses regular",
    "training_layouts": "tiny",
    "training_service": "--clients 4 --seconds 1 --steps 2",
    "view": "--trajectories 200 --tokens 5",
    "weight_transfer": "--models 3M --engines 1 --rounds 1",
}
"""Script -> the arguments with which it takes the least time."""

NOT_ALONE = {
    "compare": "it runs others of these scripts",
    **dict.fromkeys(("preference", "gkd"), "it needs TRL, which no extra of skyrl installs"),
    "distillation": "it needs the quick start's trained model, which is the teacher",
}
"""Scripts that cannot run here, and why."""

NEEDS_THE_QUICK_START = {
    *("asynchrony", "checkpoints", "curriculum", "data_start", "driver", "grpo_step", "parity", "staleness"),
}


def test_every_script_of_the_benchmarks_has_a_shortest_form() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert scripts == SHORTEST.keys() | NOT_ALONE.keys()


@pytest.mark.long
@pytest.mark.parametrize("script", long_except(SHORTEST, "config"))
def test_a_benchmark_prints_json(script: str) -> None:
    if script in NEEDS_THE_QUICK_START:
        subprocess.run([sys.executable, "examples/quickstart/prepare.py"], cwd=ROOT, check=True, capture_output=True)
    command = [sys.executable, "-m", f"benchmarks.{script}", *SHORTEST[script].split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    assert json.loads(result.stdout.strip().splitlines()[-1])
