"""Messages of components that serve both trees name the fields of the supervised file, which has no `trainer`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from skyrl.config import compose
from skyrl.errors import SkyRLError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.sft import SupervisedExp
from skyrl.learners import forward
from skyrl.tree import evolve_at
from tests.supervised_run import settings


def learner(experiment: SupervisedExp) -> None:
    assert experiment.learner


def tokenizer(experiment: SupervisedExp) -> None:
    assert experiment.tokenizer


def processes(experiment: SupervisedExp) -> None:
    assert experiment.processes


MESSAGES: list[tuple[dict[str, Any], Callable[[SupervisedExp], None], str]] = [
    ({"device": "cuda"}, learner, "device is cuda, but this torch sees no CUDA device: set device = cpu"),
    ({"disable_fast_tokenizer": True}, tokenizer, "set disable_fast_tokenizer = false"),
    ({"attention": "flash_attention_2", "use_sequence_packing": False}, learner, "set flash_attn = false"),
    ({"use_sequence_packing": True}, learner, "set use_sequence_packing = false"),
    ({"strategy": "deepspeed"}, learner, 'strategy = "deepspeed" needs DeepSpeed'),
    (
        {"placement__executor": "ray", "placement__ray_address": "127.0.0.1:1"},
        processes,
        "correct placement.ray_address",
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["sft", "reward_model"])
@pytest.mark.parametrize(("changes", "call", "remedy"), MESSAGES, ids=[remedy for *_, remedy in MESSAGES])
def test_a_message_names_the_field_as_the_supervised_file_has_it(
    nano: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    changes: dict[str, Any],
    call: Callable[[SupervisedExp], None],
    remedy: str,
) -> None:
    looks_ahead_and_sees_its_neighbours = iter([False, True])
    imported = importlib.import_module

    def without_deepspeed(name: str, package: str | None = None) -> ModuleType:
        if name.startswith("deepspeed"):
            raise ModuleNotFoundError(name)
        return imported(name, package)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(forward, "_differ", lambda one, other: next(looks_ahead_and_sees_its_neighbours))
    monkeypatch.setattr(importlib, "import_module", without_deepspeed)
    checked = {name: value for name, value in changes.items() if name != "attention"}  # refused on a CPU by the check
    run: Any = compose([], settings(nano, tmp_path, kind, **checked)).config
    run = evolve_at(run, "attention", changes.get("attention", run.attention))
    experiment: Any = experiment_class(run)(run)
    with experiment.resources, pytest.raises(SkyRLError) as refused:
        call(experiment)
    assert remedy in str(refused.value)
    assert "trainer." not in str(refused.value)
