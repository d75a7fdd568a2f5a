"""Two runs compared bit for bit: weights, optimizer, metrics, and every token that was sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.nano_run import metrics


def tokens(out: Path) -> list[dict[str, Any]]:
    """What was sampled, in order of steps."""
    text = (out / "run" / "trajectories.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def tensors(out: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the last checkpoint, and the weights of the model."""
    found = load_file(out / "run" / "model" / "model.safetensors")
    [*_, last] = sorted((out / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.split("_")[-1]))
    for file in sorted(last.rglob("*.safetensors")):
        found |= {f"{file.name}:{name}": value for name, value in load_file(file).items()}
    return found


def assert_same(one: Path, other: Path) -> None:
    assert tokens(one) == tokens(other)
    assert_same_learning(one, other)


def assert_same_learning(one: Path, other: Path) -> None:
    """Of runs that sample nothing: supervised ones."""
    assert metrics(one) == metrics(other)
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys() and any("optimizer." in name for name in first)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
