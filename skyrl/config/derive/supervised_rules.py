"""The roles of supervised runs, which have one model, and their derivation rules beside those of every kind of run."""

from __future__ import annotations

from functools import partial

from skyrl.config.derive import rules_in
from skyrl.config.derive.every_kind import EVERY_KIND_RULES
from skyrl.config.derive.model_tables import Role
from skyrl.config.settings.supervised_root import SupervisedConfig
from skyrl.tree.rules import rule

_model = partial(Role, path="", trainer="", placement="placement.", title="model")

MODEL = _model(name="policy", stored_as="policy")
"""The model of a supervised run. One batch is one optimizer step."""

REWARD = _model(name="policy", scores=True, stored_as="critic")
"""The model of a reward-model run."""


@rule(writes="placement.executor", reads=("placement.num_nodes", "placement.num_gpus_per_node"), unset="auto")
def one_rank_needs_one_process(run: SupervisedConfig) -> str:
    """One rank runs in one process; several ranks need Ray."""
    single_process = run.placement.num_nodes * run.placement.num_gpus_per_node == 1
    return "in_process" if single_process else "ray"


SUPERVISED_RULES = (*EVERY_KIND_RULES, *rules_in(__name__))
"""Derivation rules in order: a rule comes after those that write what it reads."""
