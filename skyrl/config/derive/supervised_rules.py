"""The derivation rules of supervised runs, in addition to those of every kind of run."""

from __future__ import annotations

from typing import Any

from skyrl.config.derive.every_kind import EVERY_KIND_RULES, folder_of
from skyrl.config.settings.supervised_root import SupervisedConfig
from skyrl.tree.rules import Rule, rule


@rule(writes="placement.executor", reads=("placement.num_nodes", "placement.num_gpus_per_node"), unset="auto")
def one_rank_needs_one_process(run: SupervisedConfig) -> str:
    """One rank runs in one process; several ranks need Ray."""
    alone = run.placement.num_nodes * run.placement.num_gpus_per_node == 1
    return "in_process" if alone else "ray"


@rule(writes="ckpt_path", reads=("run_path", "run_name"))
def checkpoint_path_follows_run_path(run: SupervisedConfig) -> str:
    """Beside the metrics."""
    return f"{folder_of(run)}/checkpoints"


@rule(writes="export_path", reads=("run_path", "run_name"))
def export_path_follows_run_path(run: SupervisedConfig) -> str:
    """Beside the metrics."""
    return f"{folder_of(run)}/exports"


SUPERVISED_RULES: tuple[Rule[Any], ...] = (
    *EVERY_KIND_RULES,
    one_rank_needs_one_process,
    checkpoint_path_follows_run_path,
    export_path_follows_run_path,
)
"""Derivation rules in order: a rule comes after those that write what it reads."""
