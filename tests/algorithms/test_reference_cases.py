"""The numeric cases of the reference: inputs and outputs of formulas, obtained by running SkyRL.

`pytest --reference=DIR` takes another file of the same format. `DIFFERENT` lists what we decide otherwise, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.reference_functions import OURS, Case, inside, tensor


def skips_a_column(case: Case) -> bool:
    """Is a column left out after one that counts, in any row?"""
    masks = case["inputs"]["response_mask"]
    return any(before and not after for row in masks for before, after in pairwise(row))


def half_a_token_mask(case: Case) -> bool:
    """Is one bound of the token mask given alone?"""
    config = case["inputs"]["off_policy_correction"]
    bounds = [config.get(f"token_mask_is_threshold_{side}") for side in ("low", "high")]
    return bounds.count(None) == 1


DIFFERENT: tuple[tuple[str, Callable[[Case], bool], str], ...] = (
    (
        "off_policy_correction+policy_loss:regular",
        half_a_token_mask,
        "one bound of the token mask works alone; in the reference it silently does nothing",
    ),
    (
        "advantage:reinforce++",
        skips_a_column,
        "a later turn's reward reaches the turns before it; in the reference an observation ends the return",
    ),
    (
        "advantage:gae",
        skips_a_column,
        "only tokens that the policy chose are states and discounted; in the reference every column is",
    ),
)
"""Function, which of its cases, and the reason."""

OVER_REAL_TOKENS = {
    f"is_ratio_{kind}": "taken over real tokens; in the reference padding counts as 0" for kind in ("std", "max", "min")
}
"""Metrics of which the reference's value is not one of the tokens."""


def load(reference: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((reference / "algorithm_cases.json").read_text(encoding="utf-8"))
    return loaded


def test_every_case_has_the_reference_result(reference: Path) -> None:
    loaded = load(reference)
    cases = loaded["cases"]
    assert {case["function"] for case in cases} <= set(OURS)
    decided: dict[str, str] = {}
    for case in cases:
        found = OURS[case["function"]](case, loaded["meta"])
        try:
            expect_equal(case, found)
        except AssertionError:
            if not (reason := why_different(case)):
                raise
            decided[case["id"]] = reason
    print(f"{len(cases) - len(decided)} of {len(cases)} reference cases hold")
    for name, reason in decided.items():
        print(f"different on purpose: {name}: {reason}")


def test_what_is_different_on_purpose_is_different() -> None:
    loaded = load(Path(__file__).parents[1] / "reference")
    half = next(case for case in loaded["cases"] if case["id"] == "exec_offpolicy_8")
    half["inputs"]["off_policy_correction"]["token_mask_is_threshold_low"] = 0.9  # the smallest ratio is 0.82
    found = OURS[half["function"]](half, loaded["meta"])
    assert found["new_loss_mask"].sum() < tensor(half["expected"]["new_loss_mask"]).sum()
    reset = next(case for case in loaded["cases"] if case["id"] == "reinforcepp_returns_eos_reset")
    over_a_hole = reset | {"inputs": reset["inputs"] | {"response_mask": [[1, 0, 1]]}}
    returns = OURS[reset["function"]](over_a_hole, loaded["meta"])["returns"]
    assert returns.values.tolist() == [[4.0, 0.0, 3.0]]  # 1 + 3; the reference has 1


def why_different(case: Case) -> str:
    return next((why for function, holds, why in DIFFERENT if case["function"] == function and holds(case)), "")


def expect_equal(case: Case, ours: dict[str, Any]) -> None:
    bounds = {"rtol": 1e-5, "atol": 1e-6} | case.get("tolerance", {})
    bounds = {"rtol": bounds["rtol"], "atol": bounds.get("abs", bounds["atol"])}
    compared = [name for name in ours if case["expected"].get(name) is not None]
    assert compared, case["id"]
    for name in compared:
        expected = case["expected"][name]
        if isinstance(expected, dict):
            for key, value in expected.items():
                if key not in OVER_REAL_TOKENS:
                    close = pytest.approx(value, rel=bounds["rtol"], abs=bounds["atol"])
                    assert ours[name][key] == close, (case["id"], key)
        elif isinstance(expected, bool | str) or isinstance(ours[name], list):
            assert ours[name] == expected, (case["id"], name)
        else:
            compare(case["id"], ours[name], expected, bounds)


def compare(name: str, found: Any, expected: Any, bounds: dict[str, float]) -> None:
    wanted = tensor(expected) if isinstance(expected, list) else torch.tensor(float(expected))
    if isinstance(found, inside):
        found, wanted = found.values[found.mask], wanted[found.mask]
    values: Tensor = torch.as_tensor(found, dtype=torch.float32)
    rtol, atol = bounds["rtol"], bounds["atol"]
    torch.testing.assert_close(values, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")
