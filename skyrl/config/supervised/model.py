"""The table of the one model of a supervised run."""

from __future__ import annotations

from skyrl.config.model_tables import ModelTable

MODEL = ModelTable(
    path="",
    trainer="",
    title="model",
    ranks=lambda run: run.placement.num_nodes * run.placement.num_gpus_per_node,
)
"""The model of a supervised run. One batch is one optimizer step."""
