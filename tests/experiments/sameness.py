"""Two runs compared bit for bit: weights, optimizer, metrics, and every token that was sampled."""

from __future__ import annotations

import gzip
import json
import re
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
    state = load_file(out / "run" / "model" / "model.safetensors")
    [*_, last] = sorted((out / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.split("_")[-1]))
    for file in sorted(last.rglob("*.safetensors")):
        state |= {f"{file.name}:{name}": value for name, value in load_file(file).items()}
    return state


def assert_same(one: Path, other: Path) -> None:
    assert tokens(one) == tokens(other)
    assert_same_learning(one, other)


def assert_same_learning(one: Path, other: Path) -> None:
    """Of runs that sample nothing: supervised ones."""
    rows = metrics(one)
    assert rows == metrics(other)
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    has_learned = any(name.endswith("grad_norm") for row in rows for name in row)  # else no batch had a token to learn
    assert any("optimizer." in name for name in first) == has_learned
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


_OF_THE_MACHINE = re.compile(
    r"(^|/)(logs|index)/|\.log$|/(metrics|trajectories|timeline|alarms|sessions)\.jsonl$|/(config|progress)\.json$"
    r"|\.lock$|\.png$|/checkpoints/"
)
"""Files with times, paths or pictures of the machine in them, and those that `assert_same` compares by content."""


def assert_same_files(one: Path, other: Path) -> None:
    """Two runs left files of the same names, nothing unfinished among them, and the same bytes in all that depend on
    no machine: models, adapters, exports, evaluations, recordings.
    """
    first, second = (
        {
            str(file.relative_to(out)): file
            for part in ("run", "exports")
            for file in (out / part).rglob("*")
            if file.is_file()
        }
        for out in (one, other)
    )
    assert first.keys() == second.keys()
    assert [name for name in first if re.search(r"\.(new|old|tmp)\b", name)] == []
    compared = [name for name in first if not _OF_THE_MACHINE.search("/" + name)]
    assert any(name.startswith("run/model/") for name in compared)
    assert [name for name in compared if _content(first[name]) != _content(second[name])] == []


def _content(path: Path) -> bytes:
    """The bytes of a file, of recorded samples without the seconds that they took."""
    content = path.read_bytes()
    if path.parent.name != "recording" or ".jsonl" not in path.suffixes:
        return content
    return re.sub(rb'"timings": {[^}]*}', b"", gzip.decompress(content) if path.suffix == ".gz" else content)
