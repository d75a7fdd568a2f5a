"""The table of the one model of a supervised run."""

from __future__ import annotations

from skyrl.config.derive.model_tables import ModelTable
from skyrl.config.settings.supervised_root import SupervisedConfig

MODEL = ModelTable(
    path="",
    trainer="",
    title="model",
    ranks=lambda run: run.placement.num_nodes * run.placement.num_gpus_per_node,
)
"""The model of a supervised run. One batch is one optimizer step."""


def sharing_rows(run: SupervisedConfig) -> int:
    """Number of ranks that compute on the same rows."""
    return run.sequence_parallel_size * run.context_parallel_size * run.tensor_parallel_size
