"""Running supervised fine-tuning and reward models of the nano model of `conftest.py`, and what such a run left."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from transformers import AutoModelForCausalLM

from skyrl.config import compose
from skyrl.experiments.experiment import experiment_class
from tests.nano_run import all_metrics


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a JSONL file, and its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Words of different lengths, answered in capitals."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcd", k=rng.randint(2, 6))) for _ in range(count)]
    return [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word.upper()}]}
        for word in words
    ]


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers of x, y, z are better than those of m, n, o."""
    rng = random.Random(seed)
    return [
        {"prompt": "".join(rng.choices("abcd", k=3)), "chosen": word_of(rng, "xyz"), "rejected": word_of(rng, "mno")}
        for _ in range(count)
    ]


def word_of(rng: random.Random, letters: str) -> str:
    """Two to five of the letters."""
    return "".join(rng.choices(letters, k=rng.randint(2, 5)))


def settings(nano: Path, folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """Dotted paths and values of a run of two epochs of four batches; `__` stands for a dot."""
    rows = chats(32) if kind == "sft" else pairs(32)
    return {
        "kind": kind,
        "model.path": str(nano / "model"),
        "train_datasets": (write(folder / "train.jsonl", rows),),
        "batch_size": 8,
        "micro_train_batch_size_per_gpu": 3,
        "optimizer_config.lr": 1e-2 if kind == "sft" else 3e-3,
        "num_epochs": 2,
        "device": "cpu",
        "run_path": str(folder / "run"),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


def toml_file(path: Path, values: dict[str, Any]) -> str:
    """Dotted paths and values as the file of a run, and its name."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        *inside, last = name.split(".")
        table = tables
        for key in inside:
            table = table.setdefault(key, {})
        table[last] = value
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    return str(path)


def train(nano: Path, folder: Path, kind: str = "sft", **changes: Any) -> list[dict[str, Any]]:
    """Runs it, and reads its metrics."""
    folder.mkdir(exist_ok=True)
    config: Any = compose([], settings(nano, folder, kind, **changes)).config
    experiment_class(config)(config).run()
    return records(folder)


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of its metrics."""
    return all_metrics(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the model that the run left."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two weights of the same name and place."""
    return max((one[name] - other[name]).abs().max().item() for name in one)
