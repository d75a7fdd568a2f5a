"""Processes that begin with everything imported: forks of one that does nothing else."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "skyrl.cli.main",
        "skyrl.experiments.ppo",
        "transformers.models.qwen2.modeling_qwen2",
        "matplotlib.figure",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "tests.experiments.phases",
        "tests.learners.spreading",
        "tests.first_use",  # the last: see there
    ]
)
