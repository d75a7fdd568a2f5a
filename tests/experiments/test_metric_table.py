"""The table of metrics: nothing is logged that it lacks, and nothing stands in it that nothing logs.

Every test that reads the metrics of a run looks each name up (`nano_run.all_metrics`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl.tracking.metric_table import METRICS, MetricSpec, spec_of, unknown
from tests import nano_run, supervised_run
from tests.experiments.test_algorithms_in_runs import CRITIC

SPECS = [spec for _, specs in METRICS for spec in specs]
ALGORITHM = "trainer__algorithm__"
SHORT: dict[str, Any] = {
    "trainer__max_training_steps": 2,
    "trainer__eval_interval": -1,
    "trainer__eval_before_train": False,
}
CORRECTED: dict[str, Any] = {
    f"{ALGORITHM}off_policy_correction": {
        "tis_ratio_type": "token",
        "outlier_token_is_threshold_high": 100.0,
        "token_mask_is_threshold_high": 2.0,
        "sequence_mask_metric": "geometric",
        "geo_mask_high": 1.1,
        "geo_mask_low": 0.9,
    }
}
CORRECTED_BY_SEQUENCE: dict[str, Any] = {
    f"{ALGORITHM}off_policy_correction": {
        "tis_ratio_type": "sequence",
        "sequence_mask_metric": "product",
        "product_mask_high": 1.1,
        "product_mask_low": 0.9,
    }
}
RUNS: dict[str, dict[str, Any]] = {
    "critic": {
        **CRITIC,
        "trainer__max_training_steps": 3,
        "trainer__train_batch_size": 12,
        "trainer__ckpt_interval": 1,
        "trainer__eval_before_train": True,
        "trainer__update_ref_every_epoch": True,
        "trainer__recording": "jsonl",
    },
    "async": {"trainer__fully_async__enabled": True, f"{ALGORITHM}use_kl_loss": True, **CORRECTED},
    "replace": {
        f"{ALGORITHM}dynamic_sampling": {"type": "replace"},
        f"{ALGORITHM}policy_loss_type": "cispo",
        f"{ALGORITHM}zero_variance_filter": True,
        **CORRECTED_BY_SEQUENCE,
    },
    "importance": {f"{ALGORITHM}policy_loss_type": "importance_sampling"},
    "filter": {f"{ALGORITHM}dynamic_sampling": {"type": "filter"}, f"{ALGORITHM}policy_loss_type": "decoupled"},
}
"""Runs that together log what any ordinary run logs."""


def logged(nano: Path, out: Path) -> Iterator[str]:
    """Names that these runs log, and supervised ones."""
    for name, changes in RUNS.items():
        critic = {"trainer__critic__model__path": str(nano / "model")} if name == "critic" else {}
        nano_run.train(nano, out / name, **{**SHORT, **changes, **critic})
        for record in nano_run.all_metrics(out / name):
            yield from record
    pairs = supervised_run.pairs(8)
    for kind, rows in (("sft", supervised_run.chats(8)), ("reward_model", pairs), ("preference", pairs)):
        held_out = supervised_run.write(out / f"{kind}.jsonl", rows)
        evaluated = {"eval_datasets": (held_out,), "eval_before_train": True}
        for record in supervised_run.train(nano, out / kind, kind, num_steps=2, **evaluated):
            yield from record


def named_by_tests() -> set[str]:
    """All texts in tests: a metric of rare conditions is compared there by its name, in full or without its prefix."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(__file__).parents[1].rglob("test_*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def stands_for(spec: MetricSpec, text: str) -> bool:
    """Is the text a name of the metric, or what is renamed to it?"""
    spellings = (text, f"policy/{text}", f"eval/all/{text}", text.replace("rollout/", "eval/"))
    return any(spec_of(name) is spec for name in spellings)


@pytest.mark.long
def test_everything_in_the_table_is_logged_by_a_run_or_compared_by_a_test(nano: Path, tmp_path: Path) -> None:
    logged_specs = {spec_of(name) for name in logged(nano, tmp_path)}
    rare = [spec for spec in SPECS if spec not in logged_specs]
    texts = named_by_tests()
    assert [spec.name for spec in rare if not any(stands_for(spec, text) for text in texts)] == []
    assert len(rare) < len(SPECS) / 5


def test_every_name_is_in_the_table_once() -> None:
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))
    assert all(spec.unit and spec.meaning.endswith(".") for spec in SPECS)


def test_a_name_that_nobody_described_is_found() -> None:
    assert unknown(["policy/grad_norm", "policy/no_such", "reward/avg_pass_at_4", "reward/avg_pass_at_x"]) == [
        "policy/no_such",
        "reward/avg_pass_at_x",
    ]
