"""Runs of a mixture of experts whose learner replays the experts of its rollouts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.routing_replay import drawn, measured, save_mixture
from tests import nano_run
from tests.experiments.test_async_runs import ASYNC
from tests.long_cases import long_except

REPLAYED: dict[str, Any] = {
    "trainer__policy__moe_enable_routing_replay": True,
    "trainer__ref__moe_enable_routing_replay": True,
    "trainer__algorithm__use_kl_loss": True,
    "generator__inference_engine__enable_return_routed_experts": True,
    "generator__inference_engine__rollout_dtype": "bfloat16",
    "generator__inference_engine__logprob_parity_bound": 1.0,
    "trainer__max_training_steps": 2,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}


def test_with_rollouts_in_sixteen_bits_replay_brings_learner_and_engine_together(tmp_path: Path) -> None:
    save_mixture(tmp_path, layers=2, experts=8)
    statistics = measured(tmp_path, asyncio.run(drawn(tmp_path, "bfloat16", prompts=6, samples=2, tokens=24)))
    assert statistics["tokens_routed_otherwise"] > 0.01
    assert statistics["with_replay"]["mean"] < statistics["without_replay"]["mean"]
    assert statistics["with_replay"]["max"] < statistics["without_replay"]["max"]


@pytest.mark.long
@pytest.mark.parametrize("mode", long_except(["synchronous", "asynchronous"], "asynchronous"))
def test_a_run_replays_what_its_engine_chose(mode: str, nano: Path, tmp_path: Path) -> None:
    apart = {}
    for replays in (False, True):
        changes = {**REPLAYED, **(ASYNC if mode == "asynchronous" else {})}
        if not replays:
            changes = {name: value for name, value in changes.items() if "routing_replay" not in name}
        out = tmp_path / str(replays)
        nano_run.train(nano, out, trainer__policy__model__path=str(nano / "mixture"), **changes)
        first = next(record for record in nano_run.metrics(out) if "policy/grad_norm" in record)
        apart[replays] = first["policy/rollout_train_logprobs_abs_diff_max"]
        assert 0 <= first["policy/router_unused_experts"] <= 1 and first["policy/router_entropy"] > 0
        assert first["policy/router_max_violation"] >= first["policy/router_mean_violation"] >= 0
    if mode == "synchronous":  # two asynchronous runs begin with the samples that came first, which are not the same
        assert apart[True] <= apart[False]
