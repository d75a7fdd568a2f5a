"""Losses of pairs, gradients and measurements equal those of TRL 1.16 on random ragged batches.

`trl_preferences.py` makes the stored cases; the long suite compares 200 other batches.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from skyrl.algorithms.preferences import PAIR_LOSSES
from skyrl.batch import RowTensors, TrainingBatch
from skyrl.config import PreferenceConfig
from skyrl.experiments.preference import preference_objective
from skyrl.learners.workers.learning_worker import weighed
from tests.other_environments import ROOT, python_with

STORED = json.loads((ROOT / "tests" / "reference" / "trl_preferences.json").read_text(encoding="utf-8"))


def order_of(case: dict[str, Any]) -> torch.Tensor:
    """The rows of TRL, all chosen answers first, in our order."""
    return torch.arange(len(case["mask"])).view(2, -1).T.flatten()


def batch_of(case: dict[str, Any]) -> TrainingBatch:
    """Rows of a case in our order: the two answers of a pair side by side."""
    mask = torch.tensor(case["mask"]).bool()
    order = order_of(case)
    nothing, count = torch.zeros(mask.shape), len(mask)
    batch = TrainingBatch(
        input_ids=torch.zeros(mask.shape, dtype=torch.long),
        lengths=torch.full((count,), mask.shape[1]),
        loss_mask=mask[order],
        rollout_logprobs=None,
        rewards=nothing,
        groups=torch.arange(count) // 2,
        answer_lengths=torch.full((count,), mask.shape[1]),
    )
    old, reference = torch.tensor(case["logprobs"])[order], torch.tensor(case["ref"])[order]
    return batch.with_fields(old_logprobs=old, ref_logprobs=reference)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """To 1e-5, of the largest number if that is above 1: of a hundred, float32 cannot tell more."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, expected.abs().max().item()))


def assert_equal_to_trl(case: dict[str, Any], settings: dict[str, Any], expected: dict[str, Any]) -> None:
    values: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
    run = PreferenceConfig(**values)
    objective, batch = preference_objective(run), batch_of(case)
    if "margin" not in expected:  # a trainer without a reference
        batch = batch.with_fields(ref_logprobs=None)
    assert batch.old_logprobs is not None
    logprobs = batch.old_logprobs.clone().requires_grad_()
    entropy = -torch.tensor(case["squares"])[order_of(case)] if run.use_weighting else None
    loss, parts, _ = objective(logprobs, weighed(objective, batch), entropy)
    loss.backward()
    assert logprobs.grad is not None
    gradient = torch.tensor(expected["gradient"])
    order = order_of(case)
    assert_near(loss, torch.tensor(expected["loss"]))
    assert_near(torch.where(batch.loss_mask, logprobs.grad, 0.0), gradient[order])
    for name in expected.keys() - {"loss", "gradient"}:
        assert parts[name].item() == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda case: json.dumps(case["settings"]))
def test_losses_are_those_of_trl(case: dict[str, Any]) -> None:
    for batch, expected in zip(STORED["batches"], case["results"], strict=True):
        assert_equal_to_trl(batch, case["settings"], expected)


def test_every_loss_has_a_case() -> None:
    assert {name for case in STORED["cases"] for name in case["settings"]["loss_type"]} == {*PAIR_LOSSES, "sft"}


def assert_labelled_equal_to_trl(case: dict[str, Any], settings: dict[str, Any], expected: dict[str, Any]) -> None:
    run = PreferenceConfig(**{**settings, "loss_type": (settings["loss_type"],)})
    objective, mask = preference_objective(run), torch.tensor(case["mask"]).bool()
    old, reference = torch.tensor(case["logprobs"]), torch.tensor(case["ref"])
    ones = torch.ones(len(mask), dtype=torch.long)
    labels = (torch.arange(len(mask)) % 2 == 0).float()
    batch = attrs.evolve(batch_of(case), loss_mask=mask, old_logprobs=old, ref_logprobs=reference)
    batch = batch.carrying(label=RowTensors(values=labels, counts=ones))
    if settings["loss_type"] == "kto":
        baseline = (old - reference).sum(1).mean().clamp(min=0).expand(len(mask))
        batch = batch.carrying(baseline=RowTensors(values=baseline, counts=ones))
    logprobs = old.clone().requires_grad_()
    loss, parts, _ = objective(logprobs, weighed(objective, batch))
    loss.backward()
    assert logprobs.grad is not None
    assert_near(loss, torch.tensor(expected["loss"]))
    assert_near(torch.where(mask, logprobs.grad, 0.0), torch.tensor(expected["gradient"]))
    for name in expected.keys() - {"loss", "gradient"}:
        assert parts[name].item() == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("case", STORED["labelled"], ids=lambda case: json.dumps(case["settings"]))
def test_losses_of_single_answers_are_those_of_trl(case: dict[str, Any]) -> None:
    for batch, expected in zip(STORED["batches"], case["results"], strict=True):
        assert_labelled_equal_to_trl(batch, case["settings"], expected)


@pytest.mark.long
def test_losses_are_those_of_trl_on_many_batches(tmp_path: Path) -> None:
    python = python_with("trl", ["--no-deps", "trl==1.16.0"])
    packages = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(attrs.__file__).parents[1])])}
    command = [python, "-m", "tests.algorithms.trl_preferences", str(tmp_path / "cases"), "200", "1"]
    subprocess.run(command, env={**os.environ, **packages}, check=True, cwd=ROOT)
    stored = json.loads((tmp_path / "cases").read_text(encoding="utf-8"))
    for case in stored["cases"]:
        for batch, expected in zip(stored["batches"], case["results"], strict=True):
            assert_equal_to_trl(batch, case["settings"], expected)
    for case in stored["labelled"]:
        for batch, expected in zip(stored["batches"], case["results"], strict=True):
            assert_labelled_equal_to_trl(batch, case["settings"], expected)
