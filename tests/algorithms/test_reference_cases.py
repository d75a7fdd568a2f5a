"""The numeric cases of the reference: inputs and outputs of formulas, obtained by running SkyRL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl.algorithms.advantages import group_relative
from skyrl.algorithms.kl import kl_estimate
from skyrl.algorithms.logprobs import entropy, token_logprobs
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.reductions import sequence_mean, token_mean
from skyrl.envs.gsm8k import score
from skyrl.training.objective import RegularLoss

Case = dict[str, Any]


def tensor(rows: Any) -> Tensor:
    """Nested lists as float32; null stands for NaN."""
    if isinstance(rows, list) and rows and isinstance(rows[0], list):
        return torch.stack([tensor(row) for row in rows])
    return torch.tensor([float("nan") if value is None else value for value in rows], dtype=torch.float32)


def kl(case: Case) -> dict[str, Any]:
    inputs = case["inputs"]
    mask = tensor(inputs["mask"])
    values = kl_estimate(tensor(inputs["log_probs"]), tensor(inputs["ref_log_probs"]), inputs["estimator"])
    return {"kl": torch.where(mask != 0, values, 0.0) * mask}


def grpo(case: Case) -> dict[str, Any]:
    inputs = case["inputs"]
    names = sorted(set(inputs["index"]))
    groups = torch.tensor([names.index(name) for name in inputs["index"]])
    scores = tensor(inputs["token_level_rewards"]).sum(1)
    advantages = group_relative(scores, groups, normalize_by_std=inputs["grpo_norm_by_std"]).unsqueeze(1)
    return {"advantages": advantages * tensor(inputs["response_mask"])}


def regular(case: Case) -> dict[str, Any]:
    inputs, changed = case["inputs"], case["inputs"].get("config_overrides", {})
    loss = RegularLoss(clip_low=changed.get("eps_clip_low", 0.2), clip_high=changed.get("eps_clip_high", 0.2))
    mask = tensor(inputs["loss_mask"])
    logprobs = tensor(inputs["log_probs"]).requires_grad_()
    seen = LossInputs(
        logprobs=logprobs,
        old_logprobs=tensor(inputs["old_log_probs"]),
        rollout_logprobs=tensor(inputs["rollout_logprobs"] or inputs["old_log_probs"]),
        advantages=tensor(inputs["advantages"]),
        mask=mask.bool(),
    )
    total = (loss(seen) * mask).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    return {"loss": total.detach(), "grad_log_probs": gradient, "metrics": loss.measure(seen)}


def weighed(weights: Callable[[Tensor], Tensor]) -> Callable[[Case], dict[str, Any]]:
    def run(case: Case) -> dict[str, Any]:
        mask = tensor(case["inputs"]["mask"]).bool()
        return {"sum_of_scaled_times_mask": (weights(mask) * tensor(case["inputs"]["advantages"])).sum()}

    return run


def logprobs_of_labels(case: Case) -> dict[str, Any]:
    logits, labels = tensor(case["inputs"]["logits"][0]), torch.tensor(case["inputs"]["labels"][0])
    return {"logprobs": token_logprobs(logits, labels, temperature=1.0).unsqueeze(0)}


def entropy_of_logits(case: Case) -> dict[str, Any]:
    return {"entropy": entropy(tensor(case["inputs"]["logits"][0]), temperature=1.0).unsqueeze(0)}


def gsm8k(case: Case) -> dict[str, Any]:
    inputs = case["inputs"]
    return {"reward": score(inputs.get("action", inputs.get("response")), inputs["ground_truth"])}


OURS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "approx_kl": kl,
    "advantage:grpo": grpo,
    "policy_loss:regular": regular,
    "loss_reduction:token_mean": weighed(token_mean),
    "loss_reduction:sequence_mean": weighed(sequence_mean),
    "logprobs": logprobs_of_labels,
    "entropy": entropy_of_logits,
    "env_reward:gsm8k": gsm8k,
    "env_reward:gsm8k(strict)": gsm8k,
}
"""What this version implements; cases of other functions wait for theirs."""


def test_every_case_of_an_implemented_function_has_the_reference_result(reference: Path) -> None:
    cases = json.loads((reference / "algorithm_cases.json").read_text(encoding="utf-8"))["cases"]
    implemented = [case for case in cases if case["function"] in OURS]
    assert implemented
    for case in implemented:
        expect_equal(case, OURS[case["function"]](case))
    waiting = sorted({case["function"] for case in cases} - set(OURS))
    print(f"{len(implemented)} of {len(cases)} reference cases hold; waiting for: {', '.join(waiting)}")


def expect_equal(case: Case, ours: dict[str, Any]) -> None:
    bounds = {"rtol": 1e-5, "atol": 1e-6} | case.get("tolerance", {})
    compared = [name for name in ours if name in case["expected"]]
    assert compared, case["id"]
    for name in compared:
        expected = case["expected"][name]
        if isinstance(expected, dict):
            for key, value in expected.items():
                assert ours[name][key] == pytest.approx(value, rel=bounds["rtol"], abs=bounds["atol"]), (
                    case["id"],
                    key,
                )
            continue
        wanted = tensor(expected) if isinstance(expected, list) else torch.tensor(float(expected))
        found = torch.as_tensor(ours[name], dtype=torch.float32)
        torch.testing.assert_close(found, wanted, **bounds, msg=lambda text: f"{case['id']}: {text}")
