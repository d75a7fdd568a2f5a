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


HERE = Path(__file__).parents[1] / "reference"

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


def load(reference: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((reference / "algorithm_cases.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def meta(reference: Path) -> dict[str, Any]:
    """What holds for all cases: the reference's defaults above all."""
    meta: dict[str, Any] = load(reference)["meta"]
    return meta


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case, under the name of the case."""
    if "case" in metafunc.fixturenames:
        cases = load(metafunc.config.getoption("--reference"))["cases"]
        metafunc.parametrize("case", cases, ids=[case["id"] for case in cases])


def test_a_case_has_the_reference_result(case: Case, meta: dict[str, Any]) -> None:
    result = OURS[case["function"]](case, meta)
    try:
        expect_equal(case, result)
    except AssertionError:
        if not (reason := why_different(case)):
            raise
        print(f"different on purpose: {case['id']}: {reason}")


def test_what_is_different_on_purpose_is_different() -> None:
    loaded = load(HERE)
    half = next(case for case in loaded["cases"] if case["id"] == "exec_offpolicy_8")
    half["inputs"]["off_policy_correction"]["token_mask_is_threshold_low"] = 0.9  # the smallest ratio is 0.82
    result = OURS[half["function"]](half, loaded["meta"])
    assert result["new_loss_mask"].sum() < tensor(half["expected"]["new_loss_mask"]).sum()
    reset = next(case for case in loaded["cases"] if case["id"] == "reinforcepp_returns_eos_reset")
    over_a_hole = reset | {"inputs": reset["inputs"] | {"response_mask": [[1, 0, 1]]}}
    returns = OURS[reset["function"]](over_a_hole, loaded["meta"])["returns"]
    assert returns.values.tolist() == [[4.0, 0.0, 3.0]]  # 1 + 3; the reference has 1


@pytest.mark.parametrize(
    "name", ["exec_critic_None", "exec_regular_0", "exec_offpolicy_0", "kl_k3_basic", "masked_var"]
)
def test_a_case_without_a_mask_counts_every_token(name: str, meta: dict[str, Any]) -> None:
    case = next(case for case in load(HERE)["cases"] if case["id"] == name)
    (mask,) = {"mask", "loss_mask"} & case["inputs"].keys()
    ones = torch.ones_like(tensor(case["inputs"][mask])).tolist()
    named, unnamed = (
        OURS[case["function"]](case | {"inputs": case["inputs"] | {mask: value}}, meta) for value in (ones, None)
    )
    expect_equal({"expected": as_numbers(named)}, unnamed)


def test_the_weights_of_a_correction_are_compared_token_by_token() -> None:
    case: Case = {
        "function": "off_policy_correction",
        "inputs": {
            "old_log_probs": [[-1.0, -1.0, -1.0]],
            "rollout_logprobs": [[-1.0, -2.0, -9.0]],
            "loss_mask": [[1, 1, 0]],
            "config": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0},
        },
        "expected": {"tis_ratio": [[1.0, 2.0, 2.0]], "tis_token_clip_high_ratio": 0.5},
    }
    result = OURS[case["function"]](case, {})
    expect_equal(case, result)
    with pytest.raises(AssertionError):
        expect_equal(case | {"expected": {"tis_ratio": [[1.0, 1.0, 2.0]]}}, result)


def as_numbers(result: dict[str, Any]) -> dict[str, Any]:
    """Results as a case has them."""
    plain = {name: value.values if isinstance(value, inside) else value for name, value in result.items()}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in plain.items()}


def why_different(case: Case) -> str:
    return next((reason for function, holds, reason in DIFFERENT if case["function"] == function and holds(case)), "")


def expect_equal(case: Case, ours: dict[str, Any]) -> None:
    """Everything that is expected is found: a result that we have no name for is not left out."""
    bounds = {"rtol": 1e-5, "atol": 1e-6} | case.get("tolerance", {})
    bounds = {"rtol": bounds["rtol"], "atol": bounds.get("abs", bounds["atol"])}
    for name, expected in case["expected"].items():
        if isinstance(expected, dict):
            close = pytest.approx(expected, rel=bounds["rtol"], abs=bounds["atol"])
            assert {key: ours[name][key] for key in expected} == close, name
        elif expected is None or isinstance(expected, bool | str) or isinstance(ours[name], list):
            assert ours[name] == expected, name
        else:
            compare(name, ours[name], expected, bounds)


def compare(name: str, actual: Any, expected: Any, bounds: dict[str, float]) -> None:
    target = tensor(expected) if isinstance(expected, list) else torch.tensor(float(expected))
    if isinstance(actual, inside):
        actual, target = actual.values[actual.mask], target[actual.mask]
    values: Tensor = torch.as_tensor(actual, dtype=torch.float32)
    rtol, atol = bounds["rtol"], bounds["atol"]
    torch.testing.assert_close(values, target, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")
