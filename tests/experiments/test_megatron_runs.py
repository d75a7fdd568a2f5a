"""Runs on Ray under Megatron: they learn, and their engines get their weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl.config import compose
from skyrl.config.settings.strategies import STRATEGIES
from skyrl.experiments.ppo import BasePPOExp
from tests.experiments.forked import run
from tests.experiments.test_kills import ON_RAY as KILLED_ON_RAY
from tests.experiments.test_kills import assert_kills_change_nothing, moments
from tests.experiments.test_other_ranks import ON_RAY, RANKS, samples
from tests.experiments.test_preferences import labelled, rankings
from tests.inference.nano import nano_model
from tests.megatron_shim import (
    ON_ANY_DEVICE,
    HostPairReferenceWorker,
    HostPolicyWorker,
    HostPreferenceWorker,
    HostRewardModelWorker,
    HostSFTWorker,
)
from tests.nano_run import metrics, train
from tests.supervised_run import farthest, weights, write
from tests.supervised_run import train as train_on_rows

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"


ON_TWO_RANKS: dict[str, Any] = {
    "strategy": "megatron",
    "placement__num_gpus_per_node": 2,
    "placement__executor": "ray",
}
"""Changes of a run on rows."""


@pytest.fixture(autouse=True)
def megatron_takes_the_cpu_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes of the policy's ranks, and in the check of the configuration."""
    monkeypatch.setitem(STRATEGIES, "megatron", ON_ANY_DEVICE)
    monkeypatch.setattr("skyrl.experiments.ppo.PolicyWorker", HostPolicyWorker)
    monkeypatch.setattr("skyrl.experiments.sft.SFTExp.worker", HostSFTWorker)
    monkeypatch.setattr("skyrl.experiments.sft.RewardModelExp.worker", HostRewardModelWorker)
    monkeypatch.setattr("skyrl.experiments.preference.PreferenceExp.worker", HostPreferenceWorker)
    monkeypatch.setattr("skyrl.experiments.preference.PairReferenceWorker", HostPairReferenceWorker)


def degrees(**sizes: int) -> dict[str, Any]:
    """Changes of `train` for the policy's degrees, such as `tensor_model`."""
    table = {f"trainer__policy__megatron_config__{name}_parallel_size": size for name, size in sizes.items()}
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return {"trainer__strategy": "megatron", RANKS: ranks, **table}


def test_the_quick_start_learns_on_two_ranks_that_cut_matrices(tmp_path: Path) -> None:
    base = tmp_path / "base"
    subprocess.run([sys.executable, str(QUICKSTART / "prepare.py"), "--out", str(base)], check=True, cwd=ROOT)
    values: dict[str, Any] = {
        "data.train_data": [str(base / "train.parquet")],
        "data.val_data": [str(base / "validation.parquet")],
        "environment.env_class": f"{QUICKSTART / 'reward.py'}:sorted_exactly",
        "trainer.policy.model.path": str(base / "model"),
        "trainer.run_path": str(tmp_path / "run"),
        "trainer.placement.executor": "ray",
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.placement.heartbeat_timeout_seconds": 600,
        "trainer.strategy": "megatron",
        "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
    }
    BasePPOExp(compose([str(QUICKSTART / "grpo.toml")], values).config).run()
    scores = [row["eval/all/avg_score"] for row in metrics(tmp_path) if "eval/all/avg_score" in row]
    assert scores[-1] >= 0.8


@pytest.mark.parametrize(
    "sizes",
    [{"tensor_model": 2}, {"pipeline_model": 2}, {"context": 2}, {"tensor_model": 2, "pipeline_model": 2}],
    ids=lambda sizes: " x ".join(sizes),
)
def test_engines_get_the_weights_of_every_combination(sizes: dict[str, int], nano: Path, tmp_path: Path) -> None:
    train(nano, tmp_path, **ON_RAY | {"trainer__max_training_steps": 2} | degrees(**sizes))
    parity = [row["weight_sync/parity_max"] for row in metrics(tmp_path) if "weight_sync/parity_max" in row]
    assert parity and max(parity) < 1e-4


def test_engines_get_the_adapter_alone(nano: Path, tmp_path: Path) -> None:
    adapter = {"trainer__policy__model__lora": {"rank": 4, "alpha": 8}, "trainer__max_training_steps": 2}
    train(nano, tmp_path, **ON_RAY | adapter | degrees(tensor_model=2))
    rows = metrics(tmp_path)
    parity = [row["weight_sync/parity_max"] for row in rows if "weight_sync/parity_max" in row]
    assert parity and max(parity) < 1e-4
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_engines_get_the_weights_of_spread_experts_and_name_those_that_are_replayed(nano: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(nano / "model")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    nano_model("qwen3_moe", vocab_size=len(tokenizer), **ends).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    path = {"trainer__policy__model__path": str(tmp_path / "model"), "trainer__max_training_steps": 2}
    routed = {
        "trainer__policy__moe_enable_routing_replay": True,
        "trainer__policy__router_aux_loss_coef": 0.01,
        "generator__inference_engine__enable_return_routed_experts": True,
    }
    train(nano, tmp_path, **ON_RAY | path | routed | degrees(expert_model=2))
    rows = metrics(tmp_path)
    parity = [row["weight_sync/parity_max"] for row in rows if "weight_sync/parity_max" in row]
    assert parity and max(parity) < 1e-4
    assert all(0 <= row["policy/router_unused_experts"] < 1 for row in rows if "policy/grad_norm" in row)
    apart = [row["policy/rollout_train_logprobs_abs_diff_max"] for row in rows if "policy/grad_norm" in row]
    assert apart and max(apart) < 1e-4


@pytest.mark.parametrize(("kills", "lora"), [(10, None), (3, {"rank": 4, "alpha": 8})], ids=["whole", "adapter"])
def test_a_run_that_is_killed_ends_like_one_that_was_not(
    kills: int, lora: dict[str, int] | None, nano: Path, tmp_path: Path
) -> None:
    split: dict[str, Any] = {**KILLED_ON_RAY, **degrees(tensor_model=2)}
    if lora is not None:
        split["trainer__policy__model__lora"] = lora
    status, output = run(nano, tmp_path / "whole", **split)
    assert status == 0, output
    assert_kills_change_nothing(nano, tmp_path / "killed", tmp_path / "whole", moments(kills, seed=5), **split)


def test_a_run_goes_on_under_fsdp2_and_back(nano: Path, tmp_path: Path) -> None:
    split, sharded = ON_RAY | degrees(tensor_model=2, pipeline_model=2), {**ON_RAY, RANKS: 2}
    train(nano, tmp_path / "whole", **sharded)
    for name, first, then in (("there", sharded, split), ("back", split, sharded)):
        train(nano, tmp_path / name, **first | {"trainer__max_training_steps": 2})
        train(nano, tmp_path / name, **then | {"trainer__resume_with_changes": True})
        assert samples(tmp_path / name) == samples(tmp_path / "whole")
        for one, two in zip(metrics(tmp_path / "whole"), metrics(tmp_path / name), strict=True):
            if one["step"]:
                assert two["policy/final_loss"] == pytest.approx(one["policy/final_loss"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "ranks", "sizes"),
    [
        ("sft", 1, {}),
        ("sft", 2, {"tensor_model": 2}),
        ("sft", 2, {"pipeline_model": 2}),
        ("sft", 2, {"context": 2}),
        ("sft", 4, {"tensor_model": 2}),
        ("reward_model", 2, {"pipeline_model": 2}),
        ("preference", 2, {"tensor_model": 2}),
        ("preference", 2, {"pipeline_model": 2}),
        ("preference", 2, {"context": 2}),
        ("preference", 4, {"tensor_model": 2, "pipeline_model": 2}),
        ("preference", 4, {"tensor_model": 2}),
    ],
    ids=str,
)
def test_rows_are_learned_as_in_one_process(
    kind: str, ranks: int, sizes: dict[str, int], nano: Path, tmp_path: Path
) -> None:
    megatron = {f"megatron_config__{name}_parallel_size": size for name, size in sizes.items()}
    spread = {"strategy": "megatron", "placement__num_gpus_per_node": ranks, "placement__executor": "ray", **megatron}
    evaluated = {"eval_datasets": (str(tmp_path / "alone" / "train.jsonl"),), "eval_interval": 4}
    single_process = train_on_rows(nano, tmp_path / "alone", kind, **evaluated)
    together = train_on_rows(nano, tmp_path / "together", kind, **evaluated, **spread)
    for name in ("train/loss", "train/grad_norm", "eval/train/loss"):
        losses = [[record[name] for record in records if name in record] for records in (single_process, together)]
        assert losses[0] and losses[1] == pytest.approx(losses[0], abs=1e-5)
    if kind != "reward_model":
        assert farthest(weights(tmp_path / "alone"), weights(tmp_path / "together")) < 1e-4


@pytest.mark.parametrize(
    "variant",
    [
        {"use_weighting": True},
        {"model__lora__rank": 4},
        {"sync_ref_model": True, "ref_model_sync_steps": 2},
        {"loss_type": ["aot", "sft"], "precompute_ref_log_probs": True},
        {"use_sequence_packing": False},
        {"max_tokens_per_microbatch": 60},
    ],
    ids=lambda variant: next(iter(variant)),
)
@pytest.mark.parametrize("dimension", ["tensor", "pipeline"])
def test_pairs_are_learned_as_in_one_process_whatever_they_are_compared_with(
    dimension: str, variant: dict[str, Any], nano: Path, tmp_path: Path
) -> None:
    split = {**ON_TWO_RANKS, f"megatron_config__{dimension}_model_parallel_size": 2}
    split["megatron_config__lora_config__lora_type"] = "canonical_lora"  # as under the other strategies
    single_process = train_on_rows(nano, tmp_path / "alone", "preference", **variant)
    together = train_on_rows(nano, tmp_path / "together", "preference", **variant, **split)
    for name in ("train/loss", "train/grad_norm"):
        numbers = [[record[name] for record in records if name in record] for records in (single_process, together)]
        assert numbers[0] and numbers[1] == pytest.approx(numbers[0], abs=1e-5)


@pytest.mark.parametrize("dimension", ["tensor", "pipeline"])
@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        ({"loss_type": ["kto"]}, labelled),
        ({"loss_type": ["plackett_luce", "sigmoid"], "num_answers": 4}, rankings),
    ],
    ids=["kto", "ranked lists"],
)
def test_labels_and_lists_are_learned_as_in_one_process(
    variant: dict[str, Any], rows: Callable[..., list[dict[str, Any]]], dimension: str, nano: Path, tmp_path: Path
) -> None:
    run = {**variant, "train_datasets": (write(tmp_path / "rows.jsonl", rows(32)),), "num_epochs": 1}
    split = {**ON_TWO_RANKS, f"megatron_config__{dimension}_model_parallel_size": 2}
    single_process = train_on_rows(nano, tmp_path / "alone", "preference", **run)
    together = train_on_rows(nano, tmp_path / "together", "preference", **run, **split)
    for name in ("train/loss", "train/grad_norm"):
        numbers = [[record[name] for record in records if name in record] for records in (single_process, together)]
        assert numbers[0] and numbers[1] == pytest.approx(numbers[0], abs=1e-5)
