"""Which corrections count where samples are older than the weights, and that none is worth a warning, not a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.config import load
from skyrl.config.checks.asynchronous import interpolation_needs_stale_samples, stale_samples_are_corrected

STALE: dict[str, Any] = {
    "trainer.fully_async.enabled": True,
    "trainer.fully_async.max_staleness_steps": 2,
    "trainer.algorithm.policy_loss_type": "regular",
}
CORRECTION = "trainer.algorithm.off_policy_correction"


def problems(**changes: Any) -> list[tuple[str, str]]:
    written = {path.replace("__", "."): value for path, value in changes.items()}
    run = load([], STALE | written).config
    return [(problem.path, problem.severity) for problem in stale_samples_are_corrected(run)]


def test_nothing_that_corrects_is_a_warning() -> None:
    assert problems() == [("trainer.algorithm.policy_loss_type", "warning")]


@pytest.mark.parametrize(
    "change",
    [
        {"trainer__algorithm__policy_loss_type": "decoupled"},
        {"trainer__algorithm__policy_loss_type": "rollout_is"},
        {f"{CORRECTION}__tis_ratio_type": "token"},
        {f"{CORRECTION}__sequence_mask_metric": "geometric"},
        {"trainer__algorithm__policy_loss_type": "one_of_my_own"},
        {"trainer__fully_async__max_staleness_steps": 0},
        {"trainer__fully_async__enabled": False},
    ],
    ids=str,
)
def test_what_corrects_or_what_needs_no_correction_is_no_problem(change: dict[str, Any]) -> None:
    assert problems(**change) == []


@pytest.mark.parametrize(("staleness", "severities"), [(0, ["warning"]), (1, ["warning"]), (2, [])])
def test_an_interpolation_that_equals_the_engines_own_is_a_warning(staleness: int, severities: list[str]) -> None:
    changes = {"trainer.algorithm.old_logprobs": "interpolated", "trainer.fully_async.max_staleness_steps": staleness}
    run = load([], STALE | changes).config
    assert [problem.severity for problem in interpolation_needs_stale_samples(run)] == severities
