"""What SkyRL says about batch sizes and placement, case by case: what it refuses we refuse, what it takes we take.

The cases are in `validation_cases.json` (see `--reference`). Refusals of what is not implemented yet do not count.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import ConfigError, load, resolve
from skyrl.config.check import CHECKS
from skyrl.config.not_yet import NotYet
from tests.config.leaves import LEAVES

Case = dict[str, Any]

OURS = [check for check in CHECKS if not isinstance(getattr(check, "__self__", None), NotYet)]
SIZES = re.compile(
    r"trainer\.(logger|strategy|train_batch_size|use_sample_packing|critic\.model\.path|placement\..*|\w+_mini_batch_size"
    r"|micro_\w+|\w+\.sequence_parallel_size|\w+\.megatron_config\.\w+_parallel_size|algorithm\.use_kl_\w+)"
    r"|generator\.(n_samples_per_prompt|inference_engine\.(backend|num_engines|\w+_parallel_size|distributed_executor_backend"
    r"|weight_sync_backend|run_engines_locally|external_\w+))"
)
"""Paths that say how many there are of anything, and who shares GPUs."""


@pytest.fixture
def cases(reference: Path) -> list[Case]:
    """Runs whose overrides are sizes of our tree, and nothing else."""
    found = json.loads((reference / "validation_cases.json").read_text())["cases"]
    paths = {case["id"]: [override.partition("=")[0] for override in case["overrides"]] for case in found}
    return [
        case
        for case in found
        if case["kind"] == "train" and all(path in LEAVES and SIZES.fullmatch(path) for path in paths[case["id"]])
    ]


def refused(case: Case) -> list[str]:
    """The paths that are wrong with a case, on a machine with GPUs, where the reference was asked."""
    try:
        run = resolve(load([], ["trainer.device=cuda", *case["overrides"]]).config)
    except ConfigError as error:
        return [problem.path for problem in error.problems]
    return [problem.path for check in OURS for problem in check(run) if problem.severity == "error"]


def test_sizes_that_skyrl_refuses_are_refused(cases: list[Case]) -> None:
    wrong = [case for case in cases if case["outcome"] == "error"]
    assert len(wrong) >= 10
    assert [case["id"] for case in wrong if not refused(case)] == []


def test_sizes_that_skyrl_takes_are_taken(cases: list[Case]) -> None:
    right = [case for case in cases if case["outcome"] == "ok" and "not caught" not in case["id"]]
    assert right
    assert [(case["id"], refused(case)) for case in right if refused(case)] == []
